"""What a trained model does from loop to loop."""
