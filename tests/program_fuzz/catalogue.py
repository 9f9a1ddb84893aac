"""Layers, losses, metrics and optimizers that programs are made of, as text of Keras.

What a class of Keras needs a reason for, because no program has it, stands in `NEVER`.
"""

from __future__ import annotations

#: By what a layer takes: its text, and what it gives. Sizes are such that any order is valid.
LAYERS: dict[str, tuple[tuple[str, str], ...]] = {
    "flat": (
        ("Dense(5, activation='tanh')", "flat"),
        ("Dense(4, use_bias=False)", "flat"),
        ("EinsumDense('ab,bc->ac', output_shape=4, bias_axes='c')", "flat"),
        ("RepeatVector(3)", "seq"),
        ("Softmax()", "flat"),
        ("Reshape((-1, 1))", "seq"),
        ("SpectralNormalization(layers.Dense(4))", "flat"),
    ),
    "seq": (
        ("Conv1D(4, 3, padding='same', activation='relu')", "seq"),
        ("Conv1DTranspose(3, 2, padding='same')", "seq"),
        ("SeparableConv1D(4, 3, padding='same')", "seq"),
        ("DepthwiseConv1D(2, padding='same')", "seq"),
        ("MaxPooling1D(2, padding='same')", "seq"),
        ("AveragePooling1D(2, padding='same')", "seq"),
        ("AdaptiveAveragePooling1D(3)", "seq"),
        ("AdaptiveMaxPooling1D(2)", "seq"),
        ("UpSampling1D(2)", "seq"),
        ("ZeroPadding1D(1)", "seq"),
        ("Permute((2, 1))", "seq"),
        ("TimeDistributed(layers.Dense(3, activation='elu'))", "seq"),
        ("EinsumDense('abc,cd->abd', output_shape=(None, 4))", "seq"),
        ("LSTM(4, return_sequences=True)", "seq"),
        ("GRU(3, return_sequences=True)", "seq"),
        ("LSTM(4)", "flat"),
        ("GRU(3, reset_after=False)", "flat"),
        ("SimpleRNN(4)", "flat"),
        ("RNN([layers.LSTMCell(3), layers.GRUCell(3)])", "flat"),
        ("RNN(layers.StackedRNNCells([layers.SimpleRNNCell(3)]))", "flat"),
        ("Bidirectional(layers.LSTM(3))", "flat"),
        ("Bidirectional(layers.GRU(2, return_sequences=True), merge_mode='sum')", "seq"),
        ("GlobalAveragePooling1D()", "flat"),
        ("GlobalMaxPooling1D()", "flat"),
        ("Flatten()", "flat"),
    ),
    "image": (
        ("Conv2D(4, 3, padding='same', activation='relu')", "image"),
        ("Conv2D(3, 3, strides=2, padding='same')", "image"),
        ("Conv2DTranspose(3, 2, padding='same')", "image"),
        ("SeparableConv2D(4, 3, padding='same')", "image"),
        ("DepthwiseConv2D(3, padding='same')", "image"),
        ("MaxPooling2D(2, padding='same')", "image"),
        ("AveragePooling2D(2, padding='same')", "image"),
        ("AdaptiveAveragePooling2D(2)", "image"),
        ("AdaptiveMaxPooling2D(2)", "image"),
        ("UpSampling2D(2)", "image"),
        ("ZeroPadding2D(1)", "image"),
        ("Resizing(4, 4)", "image"),
        ("CenterCrop(2, 2)", "image"),
        ("ConvLSTM1D(3, 2, padding='same')", "seq"),
        ("TimeDistributed(layers.Conv1D(3, 2, padding='same'))", "image"),
        ("GlobalAveragePooling2D()", "flat"),
        ("GlobalMaxPooling2D()", "flat"),
        ("Flatten()", "flat"),
    ),
    "volume": (
        ("Conv3D(3, 2, padding='same')", "volume"),
        ("Conv3DTranspose(2, 2, padding='same')", "volume"),
        ("MaxPooling3D(2, padding='same')", "volume"),
        ("AveragePooling3D(2, padding='same')", "volume"),
        ("AdaptiveAveragePooling3D(2)", "volume"),
        ("AdaptiveMaxPooling3D(2)", "volume"),
        ("UpSampling3D(2)", "volume"),
        ("ZeroPadding3D(1)", "volume"),
        ("ConvLSTM2D(2, 2, padding='same')", "image"),
        ("GlobalAveragePooling3D()", "flat"),
        ("GlobalMaxPooling3D()", "flat"),
    ),
}
#: Of any tensor, which keep its shape.
SAME = (
    "Activation('gelu')",
    "ActivityRegularization(0.001, 0.002)",
    "Identity()",
    "LayerNormalization()",
    "RMSNormalization()",
    "GroupNormalization(1)",
    "BatchNormalization(synchronized=True)",
    "UnitNormalization()",
    "Rescaling(0.5, 0.1)",
    "Normalization(mean=0.1, variance=2.0)",
    "Lambda(lambda value: value * 0.5)",
    "PReLU()",
    "ELU()",
    "LeakyReLU()",
    "ReLU(max_value=2.0)",
    "Activation('softsign')",
    "Added('mean')",
    "Added('sum')",
    "Added('each')",
    "Added('weights')",
)
#: The first of a model, of data as they come.
FIRST: dict[str, tuple[tuple[str, str], ...]] = {
    "flat": (
        ("Reshape((16, 1)), STFTSpectrogram(frame_length=4, frame_step=2, fft_length=4)", "seq"),
        ("Reshape((16, 1)), STFTSpectrogram(mode='real', frame_length=4, frame_step=4, "
         "fft_length=4)", "seq"),
    ),
    "seq": (
        ("Cropping1D(1)", "seq"),
        ("Masking(0.0)", "seq"),
    ),
    "image": (("Cropping2D(1)", "image"),),
    "volume": (
        ("Cropping3D(1)", "volume"),
        ("Reshape((2, 2, 4, 4, 2)), ConvLSTM3D(2, 2, padding='same')", "volume"),
    ),
    "tokens": (
        ("Embedding(12, 4)", "seq"),
        ("Embedding(12, 3, mask_zero=True)", "seq"),
        ("ReversibleEmbedding(12, 4)", "seq"),
        ("CategoryEncoding(12, output_mode='count')", "flat"),
        ("IntegerLookup(vocabulary=[1, 2, 5, 7]), Embedding(6, 3)", "seq"),
        ("Hashing(5), Embedding(5, 3)", "seq"),
    ),
    "numbers": (("Discretization([-0.5, 0.0, 0.7]), Embedding(4, 3)", "seq"),),
    "text": (
        ("TextVectorization(vocabulary=['a', 'b', 'c'], output_sequence_length=4), "
         "Embedding(6, 3)", "seq"),
        ("StringLookup(vocabulary=['a', 'a b', 'c']), Embedding(4, 3), Reshape((1, 3))", "seq"),
    ),
    "sparse": (("Dense(4)", "flat"),),
    "ragged": (("Whole()", "seq"),),
}  # fmt: skip
#: Of a tensor and a branch of it of the same shape.
JOINS = ("Add", "Subtract", "Multiply", "Average", "Maximum", "Minimum", "Concatenate")
ATTENTION = (
    "Attention(use_scale=True)(TWICE)",
    "AdditiveAttention()(TWICE)",
    "MultiHeadAttention(2, 2, use_bias=False)(ONE, ONE)",
    "GroupQueryAttention(2, 2, 1, use_bias=False)(ONE, ONE)",
)
#: By what the targets are: the last activation, losses and metrics.
TARGETS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "number": (
        "linear",
        ("MeanSquaredError", "MeanAbsoluteError", "Huber", "LogCosh", "CosineSimilarity"),
        ("MeanSquaredError()", "MeanAbsoluteError()", "RootMeanSquaredError()", "R2Score()",
         "CosineSimilarity()", "LogCoshError()", "PearsonCorrelation()",
         "ConcordanceCorrelation()"),
    ),
    "positive": (
        "softplus",
        ("MeanSquaredLogarithmicError", "MeanAbsolutePercentageError", "Poisson", "KLDivergence"),
        ("MeanSquaredLogarithmicError()", "MeanAbsolutePercentageError()", "Poisson()",
         "KLDivergence()"),
    ),
    "binary": (
        "sigmoid",
        ("BinaryCrossentropy", "BinaryFocalCrossentropy"),
        ("BinaryAccuracy()", "BinaryCrossentropy()", "AUC()", "Precision()", "Recall()",
         "F1Score(threshold=0.5)", "FBetaScore(beta=2.0, threshold=0.4)",
         "BinaryIoU(target_class_ids=[0, 1], threshold=0.5)", "TruePositives()",
         "TrueNegatives()", "FalsePositives()", "FalseNegatives()",
         "SensitivityAtSpecificity(0.4)", "SpecificityAtSensitivity(0.4)",
         "PrecisionAtRecall(0.4)", "RecallAtPrecision(0.4)"),
    ),
    "sign": ("tanh", ("Hinge", "SquaredHinge"), ("Hinge()", "SquaredHinge()")),
    "one_hot": (
        "softmax",
        ("CategoricalCrossentropy", "CategoricalFocalCrossentropy", "CategoricalHinge"),
        ("CategoricalAccuracy()", "CategoricalCrossentropy()", "CategoricalHinge()",
         "TopKCategoricalAccuracy(2)", "OneHotIoU(3, [0, 2])", "OneHotMeanIoU(3)",
         "F1Score(average='macro')"),
    ),
    "class": (
        "softmax",
        ("SparseCategoricalCrossentropy",),
        ("SparseCategoricalAccuracy()", "SparseCategoricalCrossentropy()",
         "SparseTopKCategoricalAccuracy(2)"),
    ),
}  # fmt: skip
#: The learning rate stands where `RATE` is.
OPTIMIZERS = (
    "SGD(RATE", "SGD(RATE, momentum=0.9", "SGD(RATE, momentum=0.8, nesterov=True",
    "Adam(RATE", "Adam(RATE, amsgrad=True", "AdamW(RATE", "Adadelta(RATE", "Adagrad(RATE",
    "Adamax(RATE", "Adafactor(RATE", "Nadam(RATE", "Ftrl(RATE", "Lion(RATE", "Lamb(RATE",
    "RMSprop(RATE", "RMSprop(RATE, momentum=0.5", "RMSprop(RATE, centered=True",
    "Muon(RATE", "ScheduleFreeAdamW(RATE",
)  # fmt: skip
SCHEDULES = (
    "CosineDecay(0.02, 6)",
    "CosineDecayRestarts(0.02, 3)",
    "ExponentialDecay(0.02, 3, 0.5)",
    "InverseTimeDecay(0.02, 2, 0.5)",
    "PiecewiseConstantDecay([2, 4], [0.02, 0.01, 0.005])",
    "PolynomialDecay(0.02, 5, 0.001)",
)
CALLBACKS = (
    "ReduceLROnPlateau(monitor='loss', patience=0, factor=0.5, min_delta=0.1)",
    "EarlyStopping(monitor='loss', patience=0, min_delta=0.05, restore_best_weights=True)",
    "ModelCheckpoint(path('best.weights.h5'), monitor='loss', save_best_only=True, "
    "save_weights_only=True)",
    "LearningRateScheduler(lambda epoch, rate: rate * 0.7)",
    "LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs)))",
    "LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))",
    "TerminateOnNaN()",
    "CSVLogger(path('log.csv'))",
    "BackupAndRestore(path('backup'))",
)
#: Trained steps of the program's own; text of `source.STEPS`.
STEPS = ("mean", "sum", "sum by size", "average", "vector", "keras sum", "clipping", "slope",
         "meta", "cond", "while", "nested", "compute_loss", "no tape", "accumulating", "gan",
         "draws")  # fmt: skip

#: Classes of Keras that no program has, and the reason.
NEVER = {
    "chance: masks and noise are other on each rank (docs/numerics.md)": (
        "AlphaDropout", "Dropout", "GaussianDropout", "GaussianNoise", "SpatialDropout1D",
        "SpatialDropout2D", "SpatialDropout3D", "AugMix", "CutMix", "MixUp", "Pipeline",
        "RandAugment", "RandomBrightness", "RandomColorDegeneration", "RandomColorJitter",
        "RandomContrast", "RandomCrop", "RandomElasticTransform", "RandomErasing", "RandomFlip",
        "RandomGaussianBlur", "RandomGrayscale", "RandomHue", "RandomInvert", "RandomPerspective",
        "RandomPosterization", "RandomRotation", "RandomSaturation", "RandomSharpness",
        "RandomShear", "RandomTranslation", "RandomZoom"),
    "images of bytes, without a gradient": (
        "AutoContrast", "ContrastLimitedAdaptiveHistogramEqualization", "Equalization",
        "Solarization", "MaxNumBoundingBoxes", "HashedCrossing"),
    "float32 only, and bounded by the largest value of a rank's part (docs/numerics.md)": (
        "MelSpectrogram",),
    "of other frameworks, or a base": (
        "FlaxLayer", "JaxLayer", "TFSMLayer", "TorchModuleWrapper", "Wrapper",
        "InputLayer", "MeanMetricWrapper", "OptimizerMap"),
    "one number for a whole batch (docs/numerics.md#uneven-last-batches)": (
        "CTC", "Circle", "Dice", "Tversky"),
    "metrics of class numbers, or of values and not of predictions": (
        "Accuracy", "IoU", "MeanIoU", "Mean", "Sum"),
    "not yet": ("CategoricalGeneralizedCrossEntropy", "MultiOptimizer"),
}  # fmt: skip
