"""Before buying: does a model fit, on how much of what, how fast will it be, and what will a token cost.

``source`` finds out what the model is, ``hardware`` what can be had, ``roofline`` how long a step takes
there, ``serving`` what users then see, ``options`` ranks. ``engine_model`` predicts headrace's own engine on
this machine from what ``here`` measures.
"""
