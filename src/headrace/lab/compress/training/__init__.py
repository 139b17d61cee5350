"""Training against a teacher: distillation, repair of quantised models, draft models. Written in torch."""
