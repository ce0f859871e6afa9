"""The control routes, by subject; each class turns HTTP into calls of the controller and the supervisor."""
