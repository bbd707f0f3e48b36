"""Which term helps a trained model at its task: settings tried against the model as it is, item by item."""
