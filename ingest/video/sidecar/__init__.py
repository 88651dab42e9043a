"""The MP4 sidecar: every video file of a dataset indexed once, in a file that LeRobot reads too."""
