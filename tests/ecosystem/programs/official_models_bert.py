"""tf-models-official: BERT of two layers learns the words that are hidden, on several workers.

A configuration and the calls of `official.nlp.train`, with the strategy that its option
`--distribution_strategy=multi_worker_mirrored` makes. The sentences are numbers, in a file.
"""

import os

import numpy as np
import tensorflow as tf
import tf_keras
from official.common import distribute_utils, registry_imports  # noqa: F401
from official.core import exp_factory, task_factory, train_lib, train_utils
from record import Record

EXAMPLES, WORDS, HIDDEN, BATCH = 128, 8, 2, 16
STEPS_OF_EPOCH = EXAMPLES // BATCH


def integers(values):
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


def write(path):
    draw = np.random.default_rng(0)
    hidden = tf.train.Feature(float_list=tf.train.FloatList(value=[1.0] * HIDDEN))
    with tf.io.TFRecordWriter(path) as file:
        for first in draw.integers(1, 50, size=EXAMPLES):
            words = first + np.arange(WORDS)
            features = {
                "input_ids": integers([*words[:-HIDDEN], *[0] * HIDDEN]),
                "input_mask": integers([1] * WORDS),
                "segment_ids": integers([0] * WORDS),
                "masked_lm_positions": integers(range(WORDS - HIDDEN, WORDS)),
                "masked_lm_ids": integers(words[-HIDDEN:]),
                "masked_lm_weights": hidden,
            }
            example = tf.train.Example(features=tf.train.Features(feature=features))
            file.write(example.SerializeToString())


tf_keras.utils.set_random_seed(1)
here = os.environ["ECOSYSTEM_RECORD"]
data = f"{here}/sentences{os.getpid()}.tfrecord"
write(data)

config = exp_factory.get_exp_config("bert/pretraining")
config.override(
    {
        "task": {
            "model": {
                "cls_heads": [],
                "encoder": {
                    "type": "bert",
                    "bert": {
                        "vocab_size": 100,
                        "hidden_size": 32,
                        "num_layers": 2,
                        "num_attention_heads": 2,
                        "intermediate_size": 64,
                        "dropout_rate": 0.0,
                        "attention_dropout_rate": 0.0,
                        "max_position_embeddings": WORDS,
                    },
                },
            },
            # As under any strategy, the mean of the ranks' means.
            "scale_loss": True,
            "train_data": {
                "input_path": data,
                "global_batch_size": BATCH,
                "seq_length": WORDS,
                "max_predictions_per_seq": HIDDEN,
                "use_next_sentence_label": False,
                "shuffle_buffer_size": 1,
            },
        },
        "trainer": {
            "train_steps": 4 * STEPS_OF_EPOCH,
            "steps_per_loop": STEPS_OF_EPOCH,
            "summary_interval": STEPS_OF_EPOCH,
            "checkpoint_interval": STEPS_OF_EPOCH,
            "optimizer_config": {
                # Its AdamW clips the gradients of each rank before they are added up.
                "optimizer": {"adamw": {"gradient_clip_norm": 0.0}},
                "learning_rate": {
                    "polynomial": {"decay_steps": 4 * STEPS_OF_EPOCH, "initial_learning_rate": 1e-3}
                },
                "warmup": {"polynomial": {"warmup_steps": 4}},
            },
        },
        "runtime": {"distribution_strategy": "multi_worker_mirrored"},
    }
)
strategy = distribute_utils.get_distribution_strategy(config.runtime.distribution_strategy)
with strategy.scope():
    task = task_factory.get_task(config.task, logging_dir=here)
    trainer = train_utils.create_trainer(config, task, train=True, evaluate=False)
    trainer.model(trainer.model.inputs)  # makes all variables, for the notes

record = Record()
record.begin(trainer.model)
losses = []
train_lib.run_experiment(
    distribution_strategy=strategy,
    task=task,
    mode="train",
    params=config,
    model_dir=f"{here}/model",
    trainer=trainer,
    train_actions=[lambda output: losses.append(output["training_loss"]), record.lap],
)
record.end(trainer.model, losses)
