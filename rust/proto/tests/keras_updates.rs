//! The server's optimizers compared with Keras' own, bit by bit.
//! `tests/tensorflow/keras_updates.py` recorded the results of Keras for the same gradients.

use std::collections::BTreeMap;

use gradring_proto::dtype::{bf16, f16};
use gradring_proto::parameters::float::FloatType;
use gradring_proto::parameters::floats::Float;
use gradring_proto::parameters::optimizer::{Hyper, Optimizer, decay};
use serde_json::Value;

const ELEMENTS: usize = 16;

fn gradient<T: Float>(step: u64) -> Vec<T> {
    let element = |element: usize| {
        let mixed = (step as i64 * 7919 + element as i64 * 104_729) % 2003 - 1001;
        let scale = [1.0, 0.1, 0.01, 0.001][element % 4];
        T::of(f64::from(mixed as f32 / 997.0 * scale))
    };
    (0..ELEMENTS).map(element).collect()
}

/// Steps after which weights of this type differ from those of Keras.
fn differences<T: Float>(name: &str, case: &Value, float_type: FloatType) -> Vec<String> {
    let mut optimizer: Optimizer =
        serde_json::from_value(case["optimizer"].clone()).expect("an optimizer");
    if let Optimizer::Nadam(nadam) = &mut optimizer {
        nadam.product = float_type;
    }
    let weight_decay = case["weight_decay"].as_f64().expect("a number");
    let start = |element| -1.0 + element as f64 * (2.0 / (ELEMENTS - 1) as f64);
    let start = |element| T::of(f64::from(start(element) as f32));
    let mut weights: Vec<_> = (0..ELEMENTS).map(start).collect();
    weights[ELEMENTS - 1] = T::of(1.0);
    let slots = optimizer.initial_slots();
    let mut slots: Vec<_> = slots.iter().map(|it| [T::cast(*it); ELEMENTS]).collect();
    let shown = &case["weights"][float_type.name()];
    let shown = shown.as_object().expect("a table of weights");
    let last = shown
        .keys()
        .map(|step| step.parse::<u64>().expect("a step"));
    let mut differences = Vec::new();
    for step in 1..=last.max().expect("there are steps") {
        let hyper = Hyper {
            learning_rate: f64::from(0.1 / (1 + step % 5) as f32),
            weight_decay,
        };
        decay(&hyper, &mut weights);
        let mut slots: Vec<_> = slots
            .iter_mut()
            .map(<[T; ELEMENTS]>::as_mut_slice)
            .collect();
        optimizer.update(step, &hyper, &mut weights, &mut slots, &gradient(step));
        if let Some(expected) = shown.get(&step.to_string()) {
            let expected: Vec<u64> =
                serde_json::from_value(expected.clone()).expect("a list of bits");
            let furthest = weights
                .iter()
                .zip(&expected)
                // Signs of NaN have no meaning.
                .filter(|(ours, theirs)| !(ours.is_nan() && value(float_type, **theirs).is_nan()))
                .map(|(ours, theirs)| bits(float_type, ours.number()).abs_diff(*theirs));
            if let Some(furthest) = furthest.max().filter(|furthest| *furthest > 0) {
                let dtype = float_type.name();
                differences.push(format!("{name}, {dtype}, step {step}: {furthest} ulp"));
            }
        }
    }
    differences
}

fn bits(float_type: FloatType, value: f64) -> u64 {
    match float_type {
        FloatType::F32 => u64::from((value as f32).to_bits()),
        FloatType::F64 => value.to_bits(),
        FloatType::Bf16 => u64::from(bf16::from_f64(value).to_bits()),
        FloatType::F16 => u64::from(f16::from_f64(value).to_bits()),
    }
}

fn value(float_type: FloatType, bits: u64) -> f64 {
    match float_type {
        FloatType::F32 => f64::from(f32::from_bits(bits as u32)),
        FloatType::F64 => f64::from_bits(bits),
        FloatType::Bf16 => bf16::from_bits(bits as u16).to_f64(),
        FloatType::F16 => f16::from_bits(bits as u16).to_f64(),
    }
}

#[test]
fn every_optimizer_has_the_bits_of_keras() {
    let file = include_str!("data/keras_updates.json");
    let file: BTreeMap<String, Value> = serde_json::from_str(file).expect("it is JSON");
    let mut found = Vec::new();
    for (name, case) in file.iter().filter(|(name, _)| *name != "keras") {
        found.extend(differences::<f32>(name, case, FloatType::F32));
        found.extend(differences::<f64>(name, case, FloatType::F64));
        found.extend(differences::<bf16>(name, case, FloatType::Bf16));
        found.extend(differences::<f16>(name, case, FloatType::F16));
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}
