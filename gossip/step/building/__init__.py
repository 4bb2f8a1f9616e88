"""Construction of a model's parts: the wrapper's arguments checked, the parts made, compiled code kept off them."""
