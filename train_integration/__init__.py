"""Ray Train on top: data hand-off, sample streams, checkpoints and the training job."""
