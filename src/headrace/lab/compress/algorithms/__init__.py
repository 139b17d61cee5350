"""The numerical part, in torch: imported only where a model is compressed."""
