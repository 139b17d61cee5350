"""What a request wants: an intent and a difficulty, read from its text.

:mod:`features` and an embedding go into :mod:`classifier`; :mod:`training` fits one from labelled
:mod:`examples`, and :mod:`evaluation` says how good it is.
"""
