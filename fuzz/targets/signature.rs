#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| gradring_fuzzing::signature_header(bytes));
