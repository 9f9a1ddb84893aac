//! gradring's core: collectives over TCP and shared memory for a group of processes on Linux. It
//! knows neither Python nor TensorFlow, and is a library of its own: a program in Rust needs
//! nothing else.
//!
//! ```no_run
//! use gradring_core::communicator::Communicator;
//! use gradring_core::config::Config;
//! use gradring_core::dtype::ReduceOp;
//!
//! # fn rank_of_this_process() -> usize { 0 }
//! # fn main() -> gradring_core::error::Result<()> {
//! // On each of two hosts, with a rank of its own; rank 0 listens at this address.
//! let mut config = Config::new(rank_of_this_process(), 2, "node-a:29500");
//! config.token = b"the job's shared secret".into();
//! let group = Communicator::connect(&config, &mut || false)?;
//!
//! let mut gradients = vec![1.0_f32; 1000];
//! match group.all_reduce(&mut gradients, ReduceOp::Mean, "gradients") {
//!     Ok(()) => println!("the same bits on all ranks: {}", gradients[0]),
//!     // On every rank, with the one to look at: `rank 1 on node-b: ...`
//!     Err(error) => eprintln!("{error}"),
//! }
//! group.close();
//! # Ok(())
//! # }
//! ```
//!
//! [`Communicator`](communicator::Communicator) has `all_reduce`, `broadcast` and `barrier` over
//! slices. Its [`engine`](engine::Engine) runs every [`Collective`](collective::Collective) over a
//! [`Buffer`](buffer::Buffer) of one or several pieces of memory. It runs now, or as a
//! [`Work`](work::Work) to wait for. Every wait takes a closure that may give up
//! ([`Caller`](caller::Caller)); here it always returns `false`. `examples/sum.rs` is a whole
//! program: `cargo run -p gradring-core --example sum -- RANK SIZE ADDRESS`.
//!
//! # What is meant to stay
//!
//! The version is 0.x: a minor version may break documented names, a patch version does not. The
//! crate is not on crates.io so far; depend on it by path or by git. It needs the Rust of
//! `rust-version`.
//!
//! * *Building blocks:* [`communicator`], [`engine::Engine`] with [`collective`], [`buffer`] and
//!   [`work`], [`config`], [`dtype`], [`error`], [`caller`]. [`inquire`] and [`diagnose`] query
//!   running ranks, and name the one to blame.
//! * *Public for gradring's other crates, tests and transports,* and changed more freely: all other
//!   modules. Items that are `#[doc(hidden)]`, or behind the feature `testing`, are no promise at
//!   all.
//! * *Structures may gain fields and enums variants* with a minor version: begin a
//!   [`Config`](config::Config) with [`Config::new`](config::Config::new) and
//!   [`Settings`](config::Settings) with its `default()`, and match errors with a `_`.
//! * *The wire format has a version of its own.* All ranks of a group need the same one. Ranks that
//!   differ are refused when they connect, by an error with both numbers. Two versions of this
//!   crate may or may not have the same wire format.
//!
//! The licence is [Apache-2.0](https://github.com/gradring/gradring/blob/main/LICENSE).
//!
//! # How it is built
//!
//! A [`communicator::Communicator`] is a connected group. Its [`engine::Engine`] runs collectives
//! in launch order. The executor performs one schedule (a collective as data, of `gradring-proto`)
//! over links of `gradring-net`, and reduces with the kernels of `gradring-proto`. `forming` forms
//! the group, `failure` notices failures and finds their causes, [`observe`] keeps records.

mod calibration;
pub mod communicator;
#[doc(hidden)]
pub mod drive;
pub mod elastic;
pub mod engine;
#[doc(hidden)]
pub mod executor;
#[doc(hidden)]
pub mod failure;
#[doc(hidden)]
pub mod forming;
pub mod observe;
pub mod work;

pub use failure::diagnosis::{Findings, Known, Problem, Statement, diagnose};
pub use forming::inquiry::inquire;
pub use forming::roster::Roster;
pub use gradring_net::{caller, config};
pub use gradring_proto::{buffer, collective, dtype, error};
