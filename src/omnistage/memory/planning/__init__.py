"""The planner: where a pipeline's weights live, what that will take, and how fast it will be."""
