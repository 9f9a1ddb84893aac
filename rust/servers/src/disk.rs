//! A server's disk, with its terms and snapshots: files, or nothing.
//!
//! A file is written under another name, made durable, and then renamed, so under its own name it is
//! whole; its checksums say so, too, and one that is not is passed over with a warning. A snapshot is
//! written by a thread, from values that later updates leave alone. One that cannot be written is tried
//! again until it can: the server goes on, and updates wait only when too many are in no snapshot.
//!
//! A directory is of one job. When that job has ended well, its directory gets another name, so the next
//! job begins anew, and the snapshots stay until that job has ended, too.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, DirEntry, File};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use super::message::{Incoming, Message, Outgoing};
use super::model::Fingerprint;
use gradring_net::host::host_name;
use gradring_net::link::poll::WakeUp;
use gradring_proto::error::{Error, NotServed, Result, Text};
use gradring_proto::lock::lock;
use gradring_proto::parameters::identity::{Point, Terms, Version};
use gradring_proto::parameters::server::Disk;
use gradring_proto::parameters::snapshot::Snapshot;
use gradring_proto::wire::codec;
use gradring_proto::wire::frame::checksum;

/// Grows whenever what is in a directory changes. Versions that had none wrote a server's index there.
const FORMAT: u32 = 0x1_0003;

/// Whose directory it is, the terms, and what is trained; before it are the checksum of the rest, and
/// its format.
#[derive(Clone, Serialize, Deserialize)]
struct Known {
    server: usize,
    servers: usize,
    terms: Terms,
    /// Nothing before the first worker.
    model: Option<Fingerprint>,
}

/// How long until a snapshot that could not be written is tried again.
const AGAIN: Duration = Duration::from_secs(1);

/// What has been written, and why terms could not be.
#[derive(Default)]
struct Done {
    points: VecDeque<Point>,
    trouble: Option<Error>,
}

/// A server's memory beyond its process.
pub(crate) struct Store {
    terms: Terms,
    done: Arc<Mutex<Done>>,
    wake_up: Arc<WakeUp>,
    files: Option<Files>,
}

struct Files {
    directory: PathBuf,
    /// What the file of terms has.
    known: Known,
    /// Snapshots that are there as a whole.
    points: BTreeMap<Point, PathBuf>,
    writer: Option<Sender<Snapshot>>,
    thread: Option<JoinHandle<()>>,
    on_warning: fn(String),
    /// Locked as long as the process lives.
    _lock: File,
}

impl Store {
    /// One without a directory forgets everything with its process. Wakes `wake_up` when a snapshot is
    /// there.
    pub(crate) fn open(
        directory: Option<&Path>,
        who: (usize, usize),
        wake_up: Arc<WakeUp>,
        on_warning: fn(String),
    ) -> Result<Self> {
        let done = Arc::<Mutex<Done>>::default();
        let mut terms = Terms::default();
        let files = match directory {
            None => None,
            Some(directory) => {
                let (shared, wake_up) = (Arc::clone(&done), Arc::clone(&wake_up));
                let files = Files::open(directory, who, shared, wake_up, on_warning)?;
                terms = files.known.terms.clone();
                Some(files)
            }
        };
        Ok(Self {
            terms,
            done,
            wake_up,
            files,
        })
    }

    /// Whether the terms could be written so far.
    ///
    /// # Errors
    /// `Config` when they could not.
    pub(crate) fn check(&self) -> Result<()> {
        lock(&self.done).trouble.clone().map_or(Ok(()), Err)
    }

    /// Its directory, if it has one.
    pub(crate) fn directory(&self) -> Option<&Path> {
        self.files.as_ref().map(|files| files.directory.as_path())
    }

    /// What the snapshots in the directory are of, if there are any.
    pub(crate) fn model(&self) -> Option<Fingerprint> {
        let files = self.files.as_ref()?;
        files.known.model.filter(|_| !files.points.is_empty())
    }

    /// From now on, snapshots are of this model.
    ///
    /// # Errors
    /// `Config` when that cannot be written.
    pub(crate) fn set_model(&mut self, model: Fingerprint) -> Result<()> {
        match &mut self.files {
            Some(files) if files.known.model != Some(model) => {
                files.known.model = Some(model);
                files.write_known()
            }
            _ => Ok(()),
        }
    }

    /// The job has ended well: none goes on from here by itself.
    pub(crate) fn finish(&mut self) {
        if let Some(files) = &mut self.files {
            files.finish();
        }
    }

    /// Snapshots that were completed since.
    ///
    /// # Errors
    /// As for `check`.
    pub(crate) fn completed(&mut self) -> Result<Vec<Point>> {
        self.check()?;
        let points: Vec<_> = lock(&self.done).points.drain(..).collect();
        if let Some(files) = &mut self.files {
            for point in &points {
                if self.terms.contains(*point) {
                    files.points.insert(*point, files.path(*point));
                } else {
                    let _ = fs::remove_file(files.path(*point));
                }
            }
        }
        Ok(points)
    }
}

impl Disk for Store {
    fn terms(&self) -> Terms {
        self.terms.clone()
    }

    fn points(&self) -> Vec<Point> {
        let files = self.files.iter();
        files.flat_map(|it| it.points.keys().copied()).collect()
    }

    fn load(&mut self, point: Point) -> Option<Snapshot> {
        let files = self.files.as_mut()?;
        let found = files.read(files.points.get(&point)?);
        let snapshot = found.filter(|snapshot| snapshot.point == point);
        if snapshot.is_none() {
            files.points.remove(&point);
        }
        snapshot
    }

    fn begin(&mut self, terms: &Terms) {
        self.terms = terms.clone();
        let Some(files) = &mut self.files else {
            return;
        };
        let is_past = |point: &Point| terms.contains(*point);
        files.retain(is_past);
        files.known.terms = terms.clone();
        if let Err(error) = files.write_known() {
            lock(&self.done).trouble = Some(error);
        }
    }

    fn save(&mut self, snapshot: Snapshot) {
        match self.files.as_ref().and_then(|it| it.writer.as_ref()) {
            // Its thread has left why it has ended.
            Some(writer) => drop(writer.send(snapshot)),
            None => {
                lock(&self.done).points.push_back(snapshot.point);
                self.wake_up.wake();
            }
        }
    }

    fn forget_before(&mut self, version: Version) {
        if let Some(files) = &mut self.files {
            files.retain(|point| point.version >= version);
        }
    }
}

impl Files {
    fn open(
        directory: &Path,
        who: (usize, usize),
        done: Arc<Mutex<Done>>,
        wake_up: Arc<WakeUp>,
        on_warning: fn(String),
    ) -> Result<Self> {
        fs::create_dir_all(directory).map_err(|error| trouble("make", directory, &error))?;
        let lock_path = directory.join("lock");
        let locked = File::create(&lock_path).map_err(|it| trouble("write", &lock_path, &it))?;
        let flocked = rustix::fs::flock(&locked, FlockOperation::NonBlockingLockExclusive);
        match flocked {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let directory = Text::of(directory.display());
                return Err(NotServed::DirectoryTaken { directory }.into());
            }
            // Such as a network file system without locks.
            Err(error) => return Err(trouble("lock", &lock_path, &error.into())),
        }
        let (server, servers) = who;
        let known = Known {
            server,
            servers,
            terms: Terms::default(),
            model: None,
        };
        let mut files = Self {
            directory: directory.into(),
            known,
            points: BTreeMap::new(),
            writer: None,
            thread: None,
            on_warning,
            _lock: locked,
        };
        let entries = fs::read_dir(directory).map_err(|it| trouble("read", directory, &it))?;
        let entries: Vec<_> = entries.flatten().collect();
        let is_snapshot = |it: &DirEntry| it.file_name().to_string_lossy().starts_with(SNAPSHOT);
        match files.read_known()? {
            Some(known) => files.known = known,
            None if entries.iter().any(is_snapshot) => {
                let error = io::Error::other("it is missing, and there are snapshots");
                return Err(trouble("read", &directory.join(TERMS), &error));
            }
            None if server == 0 => files.warn_of_finished(),
            None => {}
        }
        for entry in entries {
            let (path, name) = (entry.path(), entry.file_name());
            if name.to_string_lossy().ends_with(PARTIAL) {
                let _ = fs::remove_file(&path);
            } else if is_snapshot(&entry)
                && let Some(snapshot) = files.read(&path)
            {
                files.points.insert(snapshot.point, path);
            }
        }
        let terms = files.known.terms.clone();
        files.retain(|point| terms.contains(*point));
        let (sender, snapshots) = channel::<Snapshot>();
        let writer = Writer {
            directory: files.directory.clone(),
            server,
            done,
            wake_up,
            on_warning,
        };
        let thread = std::thread::Builder::new()
            .name("gradring-snapshots".into())
            .spawn(move || writer.run(&snapshots))
            .map_err(|error| Error::no_thread(&error))?;
        files.writer = Some(sender);
        files.thread = Some(thread);
        Ok(files)
    }

    /// A snapshot that is there as a whole; warns of another.
    fn read(&self, path: &Path) -> Option<Snapshot> {
        let warn = |error: Error| {
            self.warn(&format!(
                "passes a snapshot over: {error}; servers go on from the last that all of them have whole"
            ));
        };
        read(path).map_err(warn).ok()
    }

    fn warn(&self, what: &str) {
        warn(self.on_warning, self.known.server, what);
    }

    /// Says that a job that has ended well was here, and how to go on from it.
    fn warn_of_finished(&self) {
        let finished = finished(&self.directory);
        if finished.is_dir() {
            self.warn(&format!(
                "begins anew: the last job here has finished, and {} keeps its snapshots until this one \
                 has; to go on from them, give that directory of each server this one's name again",
                finished.display()
            ));
        }
    }

    /// Writes what was begun, and leaves the directory under the name of those that are finished.
    fn finish(&mut self) {
        self.end_writing();
        let finished = finished(&self.directory);
        let attempt = || {
            match fs::remove_dir_all(&finished) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            fs::rename(&self.directory, &finished)?;
            sync_parent(&finished)
        };
        if let Err(error) = attempt() {
            self.warn(&format!(
                "cannot give {} the name {} ({error}), so the next job would go on from there; move it away",
                self.directory.display(),
                finished.display()
            ));
        }
    }

    fn end_writing(&mut self) {
        self.writer = None;
        if let Some(thread) = self.thread.take() {
            // What was begun is finished.
            drop(thread.join());
        }
    }

    fn path(&self, point: Point) -> PathBuf {
        self.directory.join(name_of(point))
    }

    /// Keeps these snapshots and removes the others.
    fn retain(&mut self, keeps: impl Fn(&Point) -> bool) {
        self.points.retain(|point, path| {
            if !keeps(point) {
                // What cannot be removed does no harm: its point is not in the past.
                let _ = fs::remove_file(path);
            }
            keeps(point)
        });
    }

    /// What an earlier process wrote, if one did.
    fn read_known(&self) -> Result<Option<Known>> {
        let path = self.directory.join(TERMS);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(trouble("read", &path, &error)),
        };
        let damaged = || trouble("read", &path, &io::Error::other("it is damaged"));
        let (sum, rest) = bytes.split_first_chunk::<4>().ok_or_else(damaged)?;
        if u32::from_le_bytes(*sum) != checksum([rest]) {
            return Err(damaged());
        }
        let format: u32 = codec::decode(rest).map_err(|_| damaged())?;
        if format != FORMAT {
            let error = io::Error::other("another version of gradring wrote it");
            return Err(trouble("read", &path, &error));
        }
        let (_, known): (u32, Known) = codec::decode(rest).map_err(|_| damaged())?;
        let directory = Text::of(self.directory.display());
        let (theirs, servers, server) = (known.server, known.servers, self.known.server);
        if theirs != server {
            return Err(NotServed::OtherDirectory {
                directory,
                theirs,
                servers,
                server,
            }
            .into());
        }
        if servers != self.known.servers {
            let (theirs, ours) = (servers, self.known.servers);
            return Err(NotServed::OtherNumber {
                directory,
                theirs,
                ours,
            }
            .into());
        }
        Ok(Some(known))
    }

    fn write_known(&self) -> Result<()> {
        let bytes = codec::encode(&(FORMAT, self.known.clone()), usize::MAX)?;
        let sum = checksum([&bytes[..]]).to_le_bytes();
        write(&self.directory.join(TERMS), &[&sum, &bytes])
    }
}

/// The thread that writes snapshots.
struct Writer {
    directory: PathBuf,
    server: usize,
    done: Arc<Mutex<Done>>,
    wake_up: Arc<WakeUp>,
    on_warning: fn(String),
}

impl Writer {
    /// Writes one after the other, until there will be no further ones.
    fn run(&self, snapshots: &Receiver<Snapshot>) {
        let mut waiting = VecDeque::new();
        while let Some(snapshot) = waiting.pop_front().or_else(|| snapshots.recv().ok()) {
            self.write(snapshot, snapshots, &mut waiting);
        }
    }

    /// Writes one, as often as it takes; takes in those that come meanwhile.
    fn write(
        &self,
        snapshot: Snapshot,
        snapshots: &Receiver<Snapshot>,
        waiting: &mut VecDeque<Snapshot>,
    ) {
        let point = snapshot.point;
        let path = self.directory.join(name_of(point));
        let message = Outgoing::new(Message::Snapshot(Arc::new(snapshot)), true);
        let attempt = || write(&path, &message.as_ref().map_err(Error::clone)?.slices());
        let mut is_last = false;
        let mut failures = 0_u64;
        while let Err(error) = attempt() {
            failures += 1;
            if failures == 1 {
                self.warn(&format!(
                    "goes on without a snapshot of version {}: {error}; it is tried again every \
                     {AGAIN:?}, and meanwhile updates wait when too many are in no snapshot",
                    point.version
                ));
            }
            if is_last {
                return;
            }
            match snapshots.recv_timeout(AGAIN) {
                Ok(next) => waiting.push_back(next),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => is_last = true,
            }
        }
        if failures > 0 {
            let version = point.version;
            self.warn(&format!(
                "has written its snapshot of version {version} after {failures} failures"
            ));
        }
        lock(&self.done).points.push_back(point);
        self.wake_up.wake();
    }

    fn warn(&self, what: &str) {
        warn(self.on_warning, self.server, what);
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        self.end_writing();
    }
}

fn warn(on_warning: fn(String), server: usize, what: &str) {
    let host = host_name();
    on_warning(format!("parameter server {server} on {host} {what}"));
}

/// Where the directory of a job is once that has ended well.
fn finished(directory: &Path) -> PathBuf {
    let mut name = directory.file_name().unwrap_or_default().to_owned();
    name.push(".finished");
    directory.with_file_name(name)
}

/// The file of `Known`.
const TERMS: &str = "terms";
/// Begins the names of snapshots.
const SNAPSHOT: &str = "snapshot-";
/// Ends the names of files that are being written.
const PARTIAL: &str = ".partial";

fn name_of(point: Point) -> String {
    format!("{SNAPSHOT}{}-{}", point.term, point.version)
}

fn trouble(what: &str, path: &Path, error: &io::Error) -> Error {
    NotServed::Disk {
        what: what.into(),
        path: Text::of(path.display()),
        error: Text::of(error),
    }
    .into()
}

/// A file with these bytes, which is there as a whole or not at all, whatever happens.
fn write(path: &Path, slices: &[&[u8]]) -> Result<()> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(PARTIAL);
    let partial = PathBuf::from(partial);
    let attempt = || {
        let mut file = File::create(&partial)?;
        for slice in slices {
            file.write_all(slice)?;
        }
        file.sync_all()?;
        fs::rename(&partial, path)?;
        sync_parent(path)
    };
    attempt().map_err(|error| {
        // What is there of it may be what others lack.
        let _ = fs::remove_file(&partial);
        trouble("write", path, &error)
    })
}

/// Makes a change of a name durable.
fn sync_parent(path: &Path) -> io::Result<()> {
    let parent = path.parent().filter(|it| !it.as_os_str().is_empty());
    File::open(parent.unwrap_or_else(|| Path::new(".")))?.sync_all()
}

fn read(path: &Path) -> Result<Snapshot> {
    let torn = |error: &io::Error| trouble("read", path, error);
    let mut file = File::open(path).map_err(|error| torn(&error))?;
    let mut incoming = Incoming::NEW;
    loop {
        let count = file.read(incoming.room()).map_err(|error| torn(&error))?;
        if count == 0 {
            return Err(torn(&io::ErrorKind::UnexpectedEof.into()));
        }
        let filled = incoming.filled(count, u64::MAX);
        match filled.map_err(|_| torn(&io::Error::other("it is damaged")))? {
            Some(Message::Snapshot(snapshot)) => return Ok(Arc::unwrap_or_clone(snapshot)),
            Some(_) => return Err(torn(&io::Error::other("it is no snapshot"))),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(directory: &Path) -> Result<Store> {
        let wake_up = Arc::new(WakeUp::new().unwrap());
        Store::open(Some(directory), (0, 2), wake_up, |_| {})
    }

    #[test]
    fn a_directory_of_another_version_is_refused_by_name() {
        let directory = std::env::temp_dir().join(format!("gradring-disk-{}", std::process::id()));
        let mut store = open(&directory).unwrap();
        store.begin(&Terms::default().followed_by(1, 0));
        drop(store);
        assert_eq!(open(&directory).unwrap().terms.term(), 1);
        let known = codec::encode(&(0_usize, 2_usize, Terms::default()), usize::MAX).unwrap();
        let sum = checksum([&known[..]]).to_le_bytes();
        fs::write(directory.join("terms"), [&sum, &known[..]].concat()).unwrap();
        let error = open(&directory).err().unwrap();
        fs::remove_dir_all(&directory).unwrap();
        assert!(error.to_string().contains("another version"), "{error}");
    }
}
