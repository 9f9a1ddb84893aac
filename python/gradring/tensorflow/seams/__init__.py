"""Private names of TensorFlow and Keras as tables, and the code that looks them up."""
