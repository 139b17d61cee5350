"""The lab: measure first, then optimise. Nothing here runs while a model is being served."""
