//! Writes what correct peers send as files, one directory per decoder, from which fuzzing starts:
//! `cargo run --package gradring-core --example decoder_samples fuzz/corpus`.

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
