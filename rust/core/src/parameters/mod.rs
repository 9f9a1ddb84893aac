//! A parameter server: servers keep the weights, workers push gradients and pull weights. Pure code.

pub mod optimizer;
pub mod shards;
