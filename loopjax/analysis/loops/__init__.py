"""What a trained model computes from loop to loop."""
