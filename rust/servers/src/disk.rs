//! A server's disk: its terms and snapshots in files, or in memory only.
//!
//! A file is written under a temporary name, synced, and then renamed, so a file under its final
//! name is complete. Its checksums prove that, and a damaged snapshot is skipped with a warning. A
//! thread writes the snapshots, from values that later updates do not change. A failed snapshot is
//! retried until it succeeds: the server continues, and updates wait only when too many are in no
//! snapshot.
//!
//! A directory belongs to one job. When the job has ended well, the directory is renamed, so the
//! next job starts from nothing. The renamed snapshots stay until the next job has ended well, too.

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

/// Format of a directory, with a number that grows with each change. Versions without a format
/// wrote a server's index in its place.
const FORMAT: u32 = 0x1_0004;

/// Content of the file of terms: whose directory it is, the terms, and the model. The file begins
/// with the checksum of the rest, and the format.
#[derive(Clone, Serialize, Deserialize)]
struct Known {
    server: usize,
    servers: usize,
    terms: Terms,
    /// `None` before the first worker.
    model: Option<Fingerprint>,
}

/// Pause before a failed snapshot is retried.
const AGAIN: Duration = Duration::from_secs(1);

/// Snapshots that have been written, and the error that stopped the writing of terms.
#[derive(Default)]
struct Done {
    points: VecDeque<Point>,
    trouble: Option<Error>,
}

/// Storage of a server that outlives its process.
pub(crate) struct Store {
    terms: Terms,
    done: Arc<Mutex<Done>>,
    wake_up: Arc<WakeUp>,
    files: Option<Files>,
}

struct Files {
    directory: PathBuf,
    /// Content of the file of terms.
    known: Known,
    /// Complete snapshots.
    points: BTreeMap<Point, PathBuf>,
    writer: Option<Sender<Snapshot>>,
    thread: Option<JoinHandle<()>>,
    on_warning: fn(String),
    /// Lock of the directory, held while the process lives.
    _lock: File,
}

impl Store {
    /// Opens a directory. Without a directory, everything is lost with the process. `wake_up` is
    /// woken when a snapshot is complete.
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

    /// Checks that the terms have been written.
    ///
    /// # Errors
    /// `Config` if they could not be written.
    pub(crate) fn check(&self) -> Result<()> {
        lock(&self.done).trouble.clone().map_or(Ok(()), Err)
    }

    /// The directory, if there is one.
    pub(crate) fn directory(&self) -> Option<&Path> {
        self.files.as_ref().map(|files| files.directory.as_path())
    }

    /// Fingerprint of the model of the snapshots in the directory, if there are any.
    pub(crate) fn model(&self) -> Option<Fingerprint> {
        let files = self.files.as_ref()?;
        files.known.model.filter(|_| !files.points.is_empty())
    }

    /// Records the model of all later snapshots.
    ///
    /// # Errors
    /// `Config` if it cannot be written.
    pub(crate) fn set_model(&mut self, model: Fingerprint) -> Result<()> {
        match &mut self.files {
            Some(files) if files.known.model != Some(model) => {
                files.known.model = Some(model);
                files.write_known()
            }
            _ => Ok(()),
        }
    }

    /// Renames the directory after the job has ended well, so that no other job continues from it.
    pub(crate) fn finish(&mut self) {
        if let Some(files) = &mut self.files {
            files.finish();
        }
    }

    /// Takes the snapshots completed since the last call.
    ///
    /// # Errors
    /// Those of `check`.
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
            // If the writer's thread has ended, it has left the reason in `done`.
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
            // For example, a network file system without locks.
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

    /// Reads a complete snapshot; warns of a damaged one, and returns `None`.
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

    /// Warns that a finished job has used this directory, and says how to continue from it.
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

    /// Waits for the snapshot being written, and renames the directory to that of a finished job.
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
            // The thread completes the snapshot that it has begun.
            drop(thread.join());
        }
    }

    fn path(&self, point: Point) -> PathBuf {
        self.directory.join(name_of(point))
    }

    /// Keeps the snapshots for which `keeps` holds, and removes the others.
    fn retain(&mut self, keeps: impl Fn(&Point) -> bool) {
        self.points.retain(|point, path| {
            if !keeps(point) {
                // A file that stays does no harm: the terms exclude its point, or it is older than
                // needed.
                let _ = fs::remove_file(path);
            }
            keeps(point)
        });
    }

    /// Reads the file of terms of an earlier process, if there is one.
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

/// State of the thread that writes snapshots.
struct Writer {
    directory: PathBuf,
    server: usize,
    done: Arc<Mutex<Done>>,
    wake_up: Arc<WakeUp>,
    on_warning: fn(String),
}

impl Writer {
    /// Writes the snapshots in their order, until the server is closed.
    fn run(&self, snapshots: &Receiver<Snapshot>) {
        let mut waiting = VecDeque::new();
        while let Some(snapshot) = waiting.pop_front().or_else(|| snapshots.recv().ok()) {
            self.write(snapshot, snapshots, &mut waiting);
        }
    }

    /// Writes one snapshot, and retries until it succeeds; queues the snapshots that arrive
    /// meanwhile.
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

/// Name of a job's directory after the job has ended well.
fn finished(directory: &Path) -> PathBuf {
    let mut name = directory.file_name().unwrap_or_default().to_owned();
    name.push(".finished");
    directory.with_file_name(name)
}

/// Name of the file of [`Known`].
const TERMS: &str = "terms";
/// Prefix of the names of snapshots.
const SNAPSHOT: &str = "snapshot-";
/// Suffix of the names of incomplete files.
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

/// Writes a file atomically: it is complete or not there, even after a crash.
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
        // Frees the disk space that other files may need.
        let _ = fs::remove_file(&partial);
        trouble("write", path, &error)
    })
}

/// Makes a rename durable.
fn sync_parent(path: &Path) -> io::Result<()> {
    let parent = path.parent().filter(|it| !it.as_os_str().is_empty());
    File::open(parent.unwrap_or_else(|| Path::new(".")))?.sync_all()
}

fn read(path: &Path) -> Result<Snapshot> {
    let torn = |error: &io::Error| trouble("read", path, error);
    let mut file = File::open(path).map_err(|error| torn(&error))?;
    let mut incoming = Incoming::NEW;
    loop {
        let count = file
            .read(incoming.spare_capacity())
            .map_err(|error| torn(&error))?;
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
