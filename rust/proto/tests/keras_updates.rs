//! The server's optimizers compared with Keras' own, bit by bit.
//! `tests/tensorflow/keras_updates.py` recorded the results of Keras for the same gradients.

use std::collections::BTreeMap;

use gradring_proto::parameters::optimizer::{Hyper, Optimizer, decay};
use serde_json::Value;

const ELEMENTS: usize = 16;

fn gradient(step: u64) -> Vec<f32> {
    let element = |element: usize| {
        let mixed = (step as i64 * 7919 + element as i64 * 104_729) % 2003 - 1001;
        let scale = [1.0, 0.1, 0.01, 0.001][element % 4];
        mixed as f32 / 997.0 * scale
    };
    (0..ELEMENTS).map(element).collect()
}

#[test]
fn every_optimizer_has_the_bits_of_keras() {
    let file = include_str!("data/keras_updates.json");
    let file: BTreeMap<String, Value> = serde_json::from_str(file).expect("it is JSON");
    let mut differences = Vec::new();
    for (name, case) in file.iter().filter(|(name, _)| *name != "keras") {
        let optimizer: Optimizer =
            serde_json::from_value(case["optimizer"].clone()).expect("an optimizer");
        let weight_decay = case["weight_decay"].as_f64().expect("a number") as f32;
        let start = |element| -1.0 + element as f64 * (2.0 / (ELEMENTS - 1) as f64);
        let mut weights: Vec<_> = (0..ELEMENTS).map(|it| start(it) as f32).collect();
        weights[ELEMENTS - 1] = 1.0;
        let slots = optimizer.initial_slots();
        let mut slots: Vec<_> = slots.iter().map(|value| [*value; ELEMENTS]).collect();
        let shown = case["weights"].as_object().expect("a table of weights");
        let last = shown
            .keys()
            .map(|step| step.parse::<u64>().expect("a step"));
        for step in 1..=last.max().expect("there are steps") {
            let hyper = Hyper {
                learning_rate: 0.1 / (1 + step % 5) as f32,
                weight_decay,
            };
            decay(&hyper, &mut weights);
            let mut slots: Vec<_> = slots
                .iter_mut()
                .map(<[f32; ELEMENTS]>::as_mut_slice)
                .collect();
            optimizer.update(step, &hyper, &mut weights, &mut slots, &gradient(step));
            if let Some(expected) = shown.get(&step.to_string()) {
                let expected: Vec<u32> =
                    serde_json::from_value(expected.clone()).expect("a list of bits");
                let ours = weights.iter().map(|weight| weight.to_bits());
                let furthest = ours
                    .zip(&expected)
                    .map(|(ours, theirs)| ours.abs_diff(*theirs));
                if let Some(furthest) = furthest.max().filter(|furthest| *furthest > 0) {
                    differences.push(format!("{name}, step {step}: {furthest} ulp"));
                }
            }
        }
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}
