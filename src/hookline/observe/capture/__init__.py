"""Keep what flows through a model, to look at or to put back (`hookline.capture`)."""
