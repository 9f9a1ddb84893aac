//! Record of one rank's last collectives as a file, for `gradring explain` and for timelines.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::drive::algorithm_name;
use crate::observe::clock;
use crate::observe::flight_recorder::Entry;
use crate::observe::journal::{Journal, path_in};
use gradring_proto::error::Error;
use gradring_proto::wire::gossip::ClockOffset;

/// Version of the file format, which grows with every incompatible change.
const FORMAT: u32 = 1;
/// Longest description in characters; a bucket can have hundreds of names.
const CALL_CHARS_MAX: usize = 300;

#[derive(Serialize)]
struct File<'a> {
    format: u32,
    rank: usize,
    world_size: usize,
    /// Number of earlier groups of an elastic job.
    generation: u32,
    host: &'a str,
    pid: u32,
    reason: &'a str,
    written_ns: u64,
    clock: Option<ClockOffset>,
    failure: Option<Failure>,
    /// Number of older collectives that are not listed.
    forgotten: u64,
    collectives: Vec<Line>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    channels: Vec<Channel>,
}

/// Calls in one channel.
#[derive(Serialize)]
struct Channel {
    partner: usize,
    calls: Vec<Line>,
}

#[derive(Serialize)]
struct Failure {
    message: String,
    rank: Option<usize>,
    sequence: Option<u64>,
}

#[derive(Serialize)]
struct Line {
    sequence: u64,
    #[serde(skip_serializing_if = "is_zero")]
    step: u64,
    kind: &'static str,
    call: String,
    bytes: usize,
    algorithm: &'static str,
    state: &'static str,
    last: Option<u32>,
    launched_ns: u64,
    started_ns: Option<u64>,
    entered_ns: Option<u64>,
    ended_ns: Option<u64>,
    awaited_ns: Option<(u64, u64)>,
    #[serde(skip_serializing_if = "Option::is_none")]
    place: Option<String>,
}

impl From<&Entry> for Line {
    fn from(entry: &Entry) -> Self {
        Self {
            sequence: entry.sequence,
            step: entry.step,
            kind: entry.call.collective.name(),
            call: entry
                .call
                .to_string()
                .chars()
                .take(CALL_CHARS_MAX)
                .collect(),
            bytes: entry.call.bytes(),
            algorithm: algorithm_name(&entry.call, entry.algorithm),
            state: entry.state.name(),
            last: entry.last,
            launched_ns: clock::unix_ns(entry.launched),
            started_ns: entry.started.map(clock::unix_ns),
            entered_ns: entry.entered.map(clock::unix_ns),
            ended_ns: entry.ended.map(clock::unix_ns),
            awaited_ns: entry
                .awaited
                .map(|(from, to)| (clock::unix_ns(from), clock::unix_ns(to))),
            place: entry.place.as_deref().map(String::from),
        }
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
const fn is_zero(step: &u64) -> bool {
    *step == 0
}

/// Entries of `journal` since `since_ns`, as JSON.
#[must_use]
pub fn to_json(journal: &Journal, failure: Option<&Error>, reason: &str, since_ns: u64) -> Vec<u8> {
    let (entries, forgotten) = journal.recorder.entries();
    let lines = |entries: Vec<Entry>| -> Vec<Line> {
        let recent = |entry: &&Entry| clock::unix_ns(entry.launched) >= since_ns;
        entries.iter().filter(recent).map(Line::from).collect()
    };
    let channels = journal.recorder.beside().into_iter();
    let file = File {
        format: FORMAT,
        rank: journal.rank,
        world_size: journal.hosts.len(),
        generation: journal.recorder.generation(),
        host: &journal.hosts[journal.rank],
        pid: std::process::id(),
        reason,
        written_ns: clock::now_ns(),
        clock: journal.clock(),
        failure: failure.map(|error| Failure {
            message: error.to_string(),
            rank: error.blamed.as_ref().map(|blamed| blamed.rank),
            sequence: error.sequence,
        }),
        forgotten,
        collectives: lines(entries),
        channels: channels
            .map(|(partner, calls)| Channel {
                partner,
                calls: lines(calls),
            })
            .filter(|channel| !channel.calls.is_empty())
            .collect(),
    };
    serde_json::to_vec(&file).expect("numbers and strings can be written as JSON")
}

/// Writes the record of `journal`, if a directory for it was named. A failure is reported on
/// standard error only: nobody but the person at the terminal could react.
pub(crate) fn write_down(journal: &Journal, failure: Option<&Error>, reason: &str) {
    let Some(directory) = journal.directory() else {
        return;
    };
    let json = to_json(journal, failure, reason, 0);
    if let Err(error) = write(&directory, journal.rank, &json) {
        // Standard error may be on the same disk.
        let _ = writeln!(
            std::io::stderr(),
            "gradring: rank {} on {} cannot write its flight record to {} ({error}); set \
             GRADRING_FLIGHT_DIR to a directory that it can write to",
            journal.rank,
            journal.hosts[journal.rank],
            directory.display()
        );
    }
}

/// Writes `json` to the rank's file in `directory`, which is made if it is missing. A reader of the
/// file finds the old contents or the new ones, never half of them.
///
/// # Errors
/// The directory or the file cannot be written.
pub fn write(directory: &Path, rank: usize, json: &[u8]) -> std::io::Result<PathBuf> {
    std::fs::create_dir_all(directory)?;
    let path = path_in(directory, rank);
    let unfinished = path.with_extension("json.part");
    std::fs::File::create(&unfinished)?.write_all(json)?;
    std::fs::rename(&unfinished, &path)?;
    Ok(path)
}
