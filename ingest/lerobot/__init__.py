"""LeRobotDataset v3 as it is on disk: metadata, rows, the place of every picture, and an audit of all of it."""
