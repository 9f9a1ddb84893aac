//! Sums over TCP, without Python. Start one terminal for each rank, beginning with rank 0:
//!
//!     GRADRING_TOKEN=secret cargo run -p gradring-core --example sum -- RANK 2 127.0.0.1:29500

use std::env;
use std::error::Error;
use std::process::ExitCode;

use gradring_core::communicator::Communicator;
use gradring_core::config::Config;
use gradring_core::dtype::ReduceOp;

const USAGE: &str =
    "usage: GRADRING_TOKEN=SECRET sum RANK SIZE ADDRESS, where rank 0 listens at ADDRESS";

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let token = env::var("GRADRING_TOKEN").unwrap_or_default();
    match sum(&arguments, &token) {
        Ok(summary) => {
            println!("{summary}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Takes part in the sum with these arguments, and returns the line to print.
pub(crate) fn sum(arguments: &[String], token: &str) -> Result<String, Box<dyn Error>> {
    let [rank, world_size, address] = arguments else {
        return Err(USAGE.into());
    };
    if token.is_empty() {
        return Err(USAGE.into());
    }
    let mut config = Config::new(rank.parse()?, world_size.parse()?, address);
    config.token = token.into();
    config.settings.transport = "tcp".into();
    let group = Communicator::connect(&config, &mut || false)?;

    let mut values = vec![group.rank as f32 + 1.0; 1_000_000];
    group.all_reduce(&mut values, ReduceOp::Sum, "values")?;
    group.close();
    let (rank, host) = (group.rank, group.roster.host(group.rank));
    Ok(format!("rank {rank} on {host}: {}", values[0]))
}
