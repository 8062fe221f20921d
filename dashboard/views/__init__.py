"""One file a view: figures and numbers as pure functions of a run and the view's state."""
