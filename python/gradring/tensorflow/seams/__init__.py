"""Names of TensorFlow and Keras that are not public: what is done with a table, and the tables."""
