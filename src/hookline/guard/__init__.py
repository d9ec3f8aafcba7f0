"""UNDO: what a hook did to a run is taken back."""
