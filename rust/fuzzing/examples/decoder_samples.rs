//! Writes messages of correct peers to files, in one directory for each decoder. Fuzzing starts
//! from these: `cargo run --package gradring-fuzzing --example decoder_samples fuzz/corpus`.

use std::path::PathBuf;
use std::{env, fs, io};

use gradring_fuzzing::DECODERS;

fn main() -> io::Result<()> {
    let directory = PathBuf::from(env::args().nth(1).expect("the directory to write to"));
    for decoder in &DECODERS {
        let directory = directory.join(decoder.name);
        fs::create_dir_all(&directory)?;
        for (number, sample) in (decoder.samples)().iter().enumerate() {
            fs::write(directory.join(format!("sample-{number}")), sample)?;
        }
    }
    Ok(())
}
