//! Groups over real sockets: forming, working, and failing.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use gradring_core::communicator::Communicator;
use gradring_core::inquire;
use gradring_net::config::{Config, Settings};
use gradring_proto::collective::Request;
use gradring_proto::dtype::ReduceOp;
use gradring_proto::error::{Error, ErrorKind};
use gradring_proto::schedule::choice::SLOT_BYTES_MAX;
use gradring_proto::wire::state::{self, Phase, State};

use common::free_address;

mod common;
#[path = "common/descriptors.rs"]
mod descriptors;

/// A timeout that the tests wait for, long enough for threads of a busy machine to find each other.
const SHORT: Duration = Duration::from_secs(4);

fn config(rank: usize, world_size: usize, rendezvous: &str) -> Config {
    Config {
        settings: Settings {
            transport: "tcp".into(),
            timeout: Duration::from_secs(30),
            stall_timeout: Duration::from_secs(30),
            stall_warning: Duration::from_secs(30),
            ..Settings::default()
        },
        token: b"secret".into(),
        ..Config::new(rank, world_size, rendezvous)
    }
}

fn with(mut config: Config, change: impl FnOnce(&mut Settings)) -> Config {
    change(&mut config.settings);
    config
}

/// Connects each config in a thread of its own, and runs `body` on the result.
fn members<T: Send + 'static>(
    configs: Vec<Config>,
    body: impl Fn(usize, Result<Arc<Communicator>, Error>) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let body = Arc::new(body);
    let threads: Vec<_> = configs
        .into_iter()
        .map(|config| {
            let body = Arc::clone(&body);
            thread::spawn(move || body(config.rank, Communicator::connect(&config, &mut || false)))
        })
        .collect();
    threads
        .into_iter()
        .map(|thread| thread.join().expect("no rank panics"))
        .collect()
}

fn group<T: Send + 'static>(
    world_size: usize,
    body: impl Fn(usize, Arc<Communicator>) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let address = free_address();
    let configs = (0..world_size).map(|rank| config(rank, world_size, &address));
    members(configs.collect(), move |rank, communicator| {
        body(rank, communicator.expect("the group forms"))
    })
}

fn all_reduce(communicator: &Communicator, values: &mut [f32]) -> Result<(), Error> {
    communicator.all_reduce(values, ReduceOp::Sum, "x")
}

fn blamed(error: &Error) -> Option<usize> {
    error.blamed.as_ref().map(|blamed| blamed.rank)
}

#[test]
fn groups_of_several_sizes_reduce_over_tcp_and_know_their_hosts() {
    for world_size in [1, 2, 3, 5] {
        let sums = group(world_size, |rank, communicator| {
            assert_eq!(communicator.roster.local_rank(rank), rank);
            let mut values = vec![rank as f32 + 1.0; 300_001];
            all_reduce(&communicator, &mut values).unwrap();
            values
        });
        let expected = (world_size * (world_size + 1) / 2) as f32;
        assert!(sums.iter().flatten().all(|&value| value == expected));
    }
}

#[test]
fn sixty_four_ranks_of_one_host_share_memory_within_its_bound() {
    // A rank has two descriptors for each peer, and here all ranks are one process.
    descriptors::allow_most();
    let (world_size, address) = (64, free_address());
    let configs = (0..world_size).map(|rank| {
        with(config(rank, world_size, &address), |settings| {
            settings.transport = "shm".into();
            settings.timeout = Duration::from_secs(120);
        })
    });
    let all_are_here = Barrier::new(world_size);
    let shared = members(configs.collect(), move |rank, communicator| {
        let communicator = communicator.expect("the group forms");
        let mut values = vec![rank as f32; 1000];
        all_reduce(&communicator, &mut values).unwrap();
        assert_eq!(values, [2016.0; 1000]);
        all_are_here.wait();
        let shared = (rank == 0).then(shared_memory_bytes);
        all_are_here.wait();
        shared
    });
    let rings = 256 << 20;
    let counters = (world_size * (world_size - 1) / 2) << 12;
    let slots = world_size * (2 * SLOT_BYTES_MAX) + (64 << 10);
    assert!(shared[0].is_some_and(|bytes| bytes > slots && bytes <= rings + counters + slots));
}

/// Bytes that this process has mapped of its links' shared memory; each file counts once.
fn shared_memory_bytes() -> usize {
    let mut files = BTreeMap::new();
    for line in std::fs::read_to_string("/proc/self/maps").unwrap().lines() {
        let [range, _, offset, _, inode, name, ..] =
            line.split_whitespace().collect::<Vec<_>>()[..]
        else {
            continue;
        };
        if name.starts_with("/memfd:gradring") {
            let number = |text| usize::from_str_radix(text, 16).unwrap();
            let (start, end) = range.split_once('-').unwrap();
            let reached = number(offset) + number(end) - number(start);
            let bytes = files.entry(inode.to_owned()).or_default();
            *bytes = reached.max(*bytes);
        }
    }
    files.values().sum()
}

#[test]
fn groups_of_several_streams_reduce_and_close_in_good_order() {
    for (world_size, streams) in [(2, 2), (3, 16)] {
        let address = free_address();
        let configs = (0..world_size).map(|rank| {
            with(config(rank, world_size, &address), |settings| {
                settings.streams = streams
            })
        });
        let sums = members(configs.collect(), |rank, communicator| {
            let communicator = communicator.unwrap();
            let mut sums = Vec::new();
            for count in [1, 70_000, 3_000_001] {
                let mut values = vec![rank as f32 + 1.0; count];
                all_reduce(&communicator, &mut values).unwrap();
                sums.extend(values);
            }
            communicator.close();
            sums
        });
        let expected = (world_size * (world_size + 1) / 2) as f32;
        assert!(sums.iter().flatten().all(|&value| value == expected));
    }
}

#[test]
fn ranks_with_another_number_of_streams_are_named_on_all() {
    let address = free_address();
    let configs = [1, 1, 4].into_iter().enumerate().map(|(rank, streams)| {
        with(config(rank, 3, &address), |settings| {
            settings.streams = streams
        })
    });
    for error in members(configs.collect(), |_, communicator| {
        communicator.err().unwrap()
    }) {
        assert!(matches!(error.kind, ErrorKind::Config { .. }), "{error}");
        assert_eq!(blamed(&error), Some(2), "{error}");
        let text = error.to_string();
        assert!(
            text.contains("streams=4") && text.contains("streams=1"),
            "{text}"
        );
    }
}

#[test]
fn impossible_numbers_of_streams_are_config_errors() {
    for streams in [0, 17] {
        let config = with(config(0, 1, ""), |settings| settings.streams = streams);
        let error = Communicator::connect(&config, &mut || false).err().unwrap();
        assert!(matches!(error.kind, ErrorKind::Config { .. }), "{error}");
    }
}

#[test]
fn a_different_shape_blames_the_odd_rank_on_all() {
    // The ranks that call the same are the majority of five, even if one or two of them are late.
    for odd in 0..5 {
        let failed = Barrier::new(5);
        let errors = group(5, move |rank, communicator| {
            let mut values = vec![1.0; if rank == odd { 7 } else { 6 }];
            let error = all_reduce(&communicator, &mut values).unwrap_err();
            // The others still need this rank's reports.
            failed.wait();
            error
        });
        for error in errors {
            assert!(matches!(error.kind, ErrorKind::Mismatch { .. }), "{error}");
            assert_eq!(blamed(&error), Some(odd), "{error}");
            let text = error.to_string();
            assert!(
                text.contains("float32[7]") && text.contains("float32[6]"),
                "{text}"
            );
        }
    }
}

#[test]
fn a_rank_that_closes_early_is_named_on_all_others() {
    let connected = Barrier::new(4);
    let errors = group(4, move |rank, communicator| {
        connected.wait();
        if rank == 2 {
            communicator.close();
            return None;
        }
        all_reduce(&communicator, &mut [1.0; 6]).err()
    });
    for (rank, error) in errors
        .into_iter()
        .enumerate()
        .filter(|(rank, _)| *rank != 2)
    {
        let error = error.unwrap_or_else(|| panic!("rank {rank} fails too"));
        assert!(matches!(error.kind, ErrorKind::PeerLost { .. }), "{error}");
        assert_eq!(blamed(&error), Some(2), "{error}");
    }
}

#[test]
fn an_abort_reaches_all_ranks_with_its_reason() {
    let address = free_address();
    let configs = (0..4).map(|rank| config(rank, 4, &address));
    let failed = Barrier::new(4);
    let errors = members(configs.collect(), move |rank, communicator| {
        // A rank that is slow to connect learns of the abort there.
        let result = communicator
            .as_ref()
            .map_err(Clone::clone)
            .and_then(|communicator| {
                if rank == 3 {
                    communicator.abort("the disk is full");
                }
                all_reduce(communicator, &mut [1.0; 6])
            });
        failed.wait();
        result.unwrap_err()
    });
    for error in errors {
        assert!(matches!(error.kind, ErrorKind::Aborted { .. }), "{error}");
        assert_eq!(blamed(&error), Some(3));
        assert!(error.to_string().contains("the disk is full"));
    }
}

/// Configs of ranks of which `one` and `other` announce each other's address.
fn swapped(world_size: usize, one: usize, other: usize) -> Vec<Config> {
    let rendezvous = free_address();
    let listeners: Vec<_> = (0..world_size).map(|_| free_address()).collect();
    let config = |rank: usize| Config {
        listen: (rank > 0).then(|| listeners[rank].clone()),
        announce: match rank {
            _ if rank == one => Some(listeners[other].clone()),
            _ if rank == other => Some(listeners[one].clone()),
            _ => None,
        },
        ..config(rank, world_size, &rendezvous)
    };
    (0..world_size).map(config).collect()
}

#[test]
fn ranks_that_are_reached_at_each_others_address_form_no_group() {
    for (token, one, other) in [(&b"secret"[..], 1, 2), (b"", 2, 3)] {
        let configs = swapped(4, one, other).into_iter().map(|config| Config {
            token: token.into(),
            ..config
        });
        let errors = members(configs.collect(), |_, communicator| {
            communicator
                .err()
                .expect("a connection leads to the wrong rank")
        });
        for error in errors {
            assert!(
                matches!(error.kind, ErrorKind::Rendezvous { .. }),
                "{error}"
            );
            let blamed = blamed(&error).unwrap();
            assert!(blamed == one || blamed == other, "{error}");
            let (expected, reached) = (format!("connected to rank {blamed}"), one + other - blamed);
            let text = error.to_string();
            assert!(text.contains(&expected), "{text}");
            assert!(text.contains(&format!("reached rank {reached}")), "{text}");
        }
    }
}

#[test]
fn a_rank_of_another_job_is_turned_away_and_the_own_one_let_in() {
    let address = free_address();
    let of_job = |job: &str, rank| Config {
        job: job.into(),
        token: Vec::new(),
        ..config(rank, 2, &address)
    };
    let rank_0 = of_job("slurm 1.0", 0);
    let first = thread::spawn(move || Communicator::connect(&rank_0, &mut || false));
    let stranger = of_job("slurm 2.0", 1);
    let error = Communicator::connect(&stranger, &mut || false)
        .err()
        .unwrap();
    assert!(
        matches!(error.kind, ErrorKind::Rendezvous { .. }),
        "{error}"
    );
    let text = error.to_string();
    assert!(text.contains("rank 1 was started by job slurm 2.0, rank 0 by job slurm 1.0"));
    let member = of_job("slurm 1.0", 1);
    let second = Communicator::connect(&member, &mut || false).unwrap();
    let first = first.join().unwrap().unwrap();
    first.close();
    second.close();
}

#[test]
fn a_rank_of_an_older_generation_is_refused_by_name_and_the_group_forms_without_it() {
    let address = free_address();
    let mut configs: Vec<_> = (0..2).map(|rank| config(rank, 2, &address)).collect();
    for config in &mut configs {
        config.generation = 7;
    }
    let mut older = config(1, 2, &address);
    older.generation = 6;
    let rank_0 = thread::spawn({
        let config = configs.remove(0);
        move || Communicator::connect(&config, &mut || false)
    });
    let error = Communicator::connect(&older, &mut || false)
        .err()
        .expect("it is of another group");
    let refusal =
        "rank 1 forms the group of generation 6, and rank 0 that of generation 7: one of them has";
    assert!(error.to_string().contains(refusal), "{error}");
    assert_eq!(blamed(&error), Some(0), "{error}");
    Communicator::connect(&configs[0], &mut || false).expect("it is of this group");
    rank_0
        .join()
        .expect("it does not panic")
        .expect("the group forms");
}

#[test]
fn a_rank_that_refuses_shared_memory_ends_the_start_of_one_that_needs_it() {
    let address = free_address();
    let with = |transport: &str, rank| {
        with(config(rank, 3, &address), |settings| {
            settings.transport = transport.into();
        })
    };
    let configs = vec![with("shm", 0), with("auto", 1), with("tcp", 2)];
    for error in members(configs, |_, communicator| communicator.err().unwrap()) {
        assert!(matches!(error.kind, ErrorKind::Config { .. }), "{error}");
        assert_eq!(blamed(&error), Some(2), "{error}");
        assert!(
            error.to_string().contains("rank 0 with transport=\"shm\""),
            "{error}"
        );
    }
}

#[test]
fn a_late_rank_is_named_by_a_timeout_on_all() {
    let address = free_address();
    let configs = (0..3).map(|rank| {
        with(config(rank, 3, &address), |settings| {
            settings.stall_timeout = SHORT
        })
    });
    let failed = Barrier::new(3);
    let errors = members(configs.collect(), move |rank, communicator| {
        let communicator = communicator.unwrap();
        if rank == 1 {
            failed.wait();
            // All data for this rank has arrived, so before the abort it could still succeed.
            while !communicator.has_failed() {
                thread::sleep(Duration::from_millis(1));
            }
        }
        let error = all_reduce(&communicator, &mut [1.0; 6]).unwrap_err();
        if rank != 1 {
            failed.wait();
        }
        error
    });
    for error in errors {
        assert!(
            matches!(error.kind, ErrorKind::CollectiveTimeout { .. }),
            "{error}"
        );
        assert_eq!(blamed(&error), Some(1), "{error}");
    }
}

#[test]
fn a_missing_rank_is_named_by_those_who_came() {
    let address = free_address();
    let configs = [0, 2].map(|rank| {
        with(config(rank, 3, &address), |settings| {
            settings.timeout = SHORT
        })
    });
    for error in members(configs.into(), |_, communicator| {
        communicator.err().unwrap()
    }) {
        assert!(
            matches!(error.kind, ErrorKind::Rendezvous { .. }),
            "{error}"
        );
        assert_eq!(blamed(&error), Some(1), "{error}");
    }
}

#[test]
fn of_many_missing_ranks_the_first_are_named_and_the_others_counted() {
    let addresses = vec!["127.0.0.1:1".into(); 1000];
    for (addresses, last_named) in [(Vec::new(), "31, 32"), (addresses, "(Connection refused")] {
        let config = with(
            Config {
                addresses,
                ..config(0, 1000, &free_address())
            },
            |settings| settings.timeout = Duration::from_millis(100),
        );
        let error = Communicator::connect(&config, &mut || false).err().unwrap();
        assert_eq!(blamed(&error), Some(1));
        let text = error.to_string();
        assert!(text.contains(last_named), "{text}");
        assert!(
            text.contains(" and 967 more of 1000 did not join"),
            "{text}"
        );
    }
}

#[test]
fn a_world_that_no_roster_holds_is_a_config_error() {
    for world_size in [2049, usize::MAX] {
        let config = config(0, world_size, &free_address());
        let error = Communicator::connect(&config, &mut || false).err().unwrap();
        assert!(matches!(error.kind, ErrorKind::Config { .. }), "{error}");
        assert!(error.to_string().contains("at most 2048 ranks"), "{error}");
    }
}

#[test]
fn a_panic_while_the_group_forms_is_an_error_that_blames_this_rank() {
    let config = config(1, 2, &free_address());
    let error = Communicator::connect(&config, &mut || panic!("a defect")).err();
    let error = error.unwrap();
    assert!(matches!(error.kind, ErrorKind::Protocol { .. }), "{error}");
    assert_eq!(blamed(&error), Some(1));
    assert!(error.to_string().contains("a defect"), "{error}");
}

#[test]
fn a_missing_rank_0_is_named_with_its_address() {
    let address = free_address();
    let config = with(config(1, 2, &address), |settings| {
        settings.timeout = Duration::from_secs(1)
    });
    let error = Communicator::connect(&config, &mut || false).err().unwrap();
    assert!(matches!(error.kind, ErrorKind::Rendezvous { .. }));
    assert_eq!(blamed(&error), Some(0));
    assert!(error.to_string().contains(&address) && error.to_string().contains("refused"));
}

#[test]
fn a_wrong_token_or_size_is_told_to_both_sides() {
    for change in [
        |config: &mut Config| config.token = b"guess".into(),
        |config: &mut Config| config.world_size = 3,
    ] {
        let address = free_address();
        let mut configs = [0, 1].map(|rank| {
            with(config(rank, 2, &address), |settings| {
                settings.timeout = SHORT
            })
        });
        change(&mut configs[1]);
        let errors = members(configs.into(), |_, communicator| {
            communicator.err().unwrap()
        });
        assert!(
            errors[0].to_string().contains("turned away"),
            "{}",
            errors[0]
        );
        assert!(
            !matches!(errors[1].kind, ErrorKind::PeerLost { .. }),
            "{}",
            errors[1]
        );
    }
}

/// Answers greetings with one byte at a time, for as long as a peer receives them.
fn dawdle(listener: TcpListener) {
    thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            thread::spawn(move || {
                while stream.write_all(&[0]).is_ok() {
                    thread::sleep(Duration::from_millis(50));
                }
            });
        }
    });
}

#[test]
fn a_stranger_at_the_rendezvous_who_talks_for_ever_holds_nobody_beyond_its_time() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    dawdle(listener);
    let config = config(1, 2, &address);
    let error = Communicator::connect(&config, &mut || false).err().unwrap();
    assert_eq!(blamed(&error), Some(0), "{error}");
    // The bytes received fail the handshake before any time limit.
    assert!(!error.to_string().contains("in time"), "{error}");
}

#[test]
fn an_interrupt_ends_every_wait_of_a_group_that_forms() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = silent
        .local_addr()
        .map(|a| (a.to_string(), silent))
        .unwrap();
    let addresses = [
        ("nobody else comes", 0, free_address()),
        ("nobody listens", 1, free_address()),
        ("nobody answers", 1, silent.0.clone()),
    ];
    for (what, rank, address) in addresses {
        let config = config(rank, 2, &address);
        let mut asked = 0;
        let connected = Communicator::connect(&config, &mut || {
            asked += 1;
            asked > 3
        });
        let error = connected.err().unwrap();
        assert!(
            matches!(error.kind, ErrorKind::Aborted { .. }),
            "{what}: {error}"
        );
        assert_eq!(asked, 4, "{what}");
    }
}

#[test]
fn a_rank_that_gives_up_while_others_are_missing_ends_the_group_for_all() {
    let address = free_address();
    let has_joined = Arc::new(AtomicBool::new(false));
    let threads: Vec<_> = [config(0, 3, &address), config(1, 3, &address)]
        .into_iter()
        .map(|config| {
            let has_joined = Arc::clone(&has_joined);
            thread::spawn(move || {
                let mut give_up = || config.rank == 1 && has_joined.load(Ordering::Relaxed);
                Communicator::connect(&config, &mut give_up).err().unwrap()
            })
        })
        .collect();
    let limit = Duration::from_secs(10);
    let missing = || inquire(&address, b"secret", None, limit).map(|state| state.phase);
    let awaited = Phase::Forming {
        missing: vec![2],
        generation: 0,
    };
    while missing() != Ok(awaited.clone()) && !threads.iter().any(JoinHandle::is_finished) {
        thread::sleep(Duration::from_millis(20));
    }
    has_joined.store(true, Ordering::Relaxed);
    for thread in threads {
        let error = thread.join().unwrap();
        // After the whole timeout, rank 2 would be blamed.
        assert_eq!(blamed(&error), Some(1), "{error}");
    }
}

#[test]
fn strangers_do_not_keep_a_group_from_forming() {
    let address = free_address();
    let noise = {
        let address = address.clone();
        thread::spawn(move || {
            let mut idle = Vec::new();
            for attempt in 0..200 {
                if let Ok(mut stream) = TcpStream::connect(&address) {
                    if attempt % 2 == 0 {
                        let _ = stream.write_all(b"GET / HTTP/1.1\r\n\r\n");
                    }
                    idle.push(stream);
                }
                thread::sleep(Duration::from_millis(2));
            }
        })
    };
    thread::sleep(Duration::from_millis(50));
    let configs = (0..3).map(|rank| config(rank, 3, &address)).collect();
    let sums = members(configs, |_, communicator| {
        let mut values = [1.0; 5];
        all_reduce(&communicator.unwrap(), &mut values).unwrap();
        values
    });
    assert_eq!(sums, [[3.0; 5]; 3]);
    noise.join().unwrap();
}

fn state(address: &str) -> State {
    inquire(address, b"secret", None, Duration::from_secs(10)).expect("the rank answers")
}

#[test]
fn a_rank_says_who_has_not_joined_while_the_group_forms() {
    let address = free_address();
    let has_reported = Arc::new(AtomicBool::new(false));
    let waiting = thread::spawn({
        let (mut config, has_reported) = (config(0, 3, &address), Arc::clone(&has_reported));
        config.generation = 2;
        move || Communicator::connect(&config, &mut || has_reported.load(Ordering::Relaxed))
    });
    let mut asked = inquire(&address, b"secret", None, Duration::from_secs(10));
    while asked.is_err() && !waiting.is_finished() {
        thread::sleep(Duration::from_millis(20));
        asked = inquire(&address, b"secret", None, Duration::from_secs(10));
    }
    has_reported.store(true, Ordering::Relaxed);
    let forming = Phase::Forming {
        missing: vec![1, 2],
        generation: 2,
    };
    assert_eq!(asked.unwrap().phase, forming);
    assert!(waiting.join().unwrap().is_err());
}

#[test]
fn a_rank_whose_listener_goes_from_one_group_to_the_next_is_asked_again() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    // Both connections end before an answer, and then the port is closed.
    let groups = thread::spawn(move || {
        for _ in 0..2 {
            drop(listener.accept().unwrap());
        }
    });
    let error = inquire(&address, b"secret", None, Duration::from_secs(60)).unwrap_err();
    groups.join().unwrap();
    let gone = format!("no process can be reached at {address}");
    assert!(error.to_string().contains(&gone), "{error}");
}

#[test]
fn a_rank_says_in_which_collective_it_is_and_for_whom_it_waits() {
    let address = free_address();
    let (entered, may_go_on) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
    let configs = (0..2).map(|rank| config(rank, 2, &address)).collect();
    let asked = {
        let (entered, may_go_on) = (Arc::clone(&entered), Arc::clone(&may_go_on));
        members(configs, move |rank, communicator| {
            let communicator = communicator.unwrap();
            all_reduce(&communicator, &mut [1.0; 8]).unwrap();
            let mut states = None;
            if rank == 1 {
                // Rank 0 enters the second collective; this rank does something else meanwhile.
                entered.wait();
                let awaits_this = |state: &State| {
                    let Phase::Formed { awaited, .. } = &state.phase else {
                        return false;
                    };
                    *awaited == [1]
                };
                while !awaits_this(&state(&address)) {
                    thread::sleep(Duration::from_millis(20));
                }
                let rank_0 = state(&address);
                let Phase::Formed { members, .. } = &rank_0.phase else {
                    unreachable!("it awaits somebody");
                };
                let rank_1 = state(&members[1].0);
                states = Some([rank_0, rank_1]);
                may_go_on.wait();
            } else {
                entered.wait();
                let released = thread::spawn({
                    let may_go_on = Arc::clone(&may_go_on);
                    move || may_go_on.wait()
                });
                all_reduce(&communicator, &mut [1.0; 8]).unwrap();
                released.join().unwrap();
            }
            if rank == 1 {
                all_reduce(&communicator, &mut [1.0; 8]).unwrap();
            }
            states
        })
    };
    let [rank_0, rank_1] = asked.into_iter().flatten().next().unwrap();
    let collectives = |state: &State| match &state.phase {
        Phase::Formed { entered, ended, .. } => {
            let sequence = |one: &Option<state::Collective>| one.as_ref().map(|one| one.sequence);
            (sequence(entered), sequence(ended))
        }
        phase => unreachable!("the group has formed: {phase:?}"),
    };
    assert_eq!(collectives(&rank_0), (Some(2), Some(1)));
    assert_eq!(collectives(&rank_1), (None, Some(1)));
    assert_eq!((rank_0.rank, rank_1.rank, rank_1.world_size), (0, 1, 2));
}

#[test]
fn nobody_learns_how_a_rank_is_without_the_token() {
    let address = free_address();
    let configs = (0..2).map(|rank| config(rank, 2, &address)).collect();
    let answers = members(configs, move |rank, communicator| {
        let communicator = communicator.unwrap();
        let answer =
            (rank == 1).then(|| inquire(&address, b"guess", None, Duration::from_secs(10)));
        all_reduce(&communicator, &mut [1.0]).unwrap();
        answer
    });
    let error = answers.into_iter().flatten().next().unwrap().unwrap_err();
    assert!(
        matches!(error.kind, ErrorKind::Authentication { .. }),
        "{error}"
    );
}

#[test]
fn a_second_group_forms_at_the_address_of_the_first_while_that_works_on() {
    let address = free_address();
    let configs = (0..3).map(|rank| config(rank, 3, &address)).collect();
    members(configs, move |rank, first| {
        let first = first.unwrap();
        let second = Communicator::connect(&config(rank, 3, &address), &mut || false).unwrap();
        for communicator in [&first, &second, &first] {
            let mut values = [rank as f32; 100];
            all_reduce(communicator, &mut values).unwrap();
            assert_eq!(values, [3.0; 100]);
        }
    });
}

#[test]
fn a_line_reaches_the_log_of_its_rank_and_of_rank_0_and_no_other() {
    static RECEIVED: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let address = free_address();
    let configs = (0..4).map(|rank| Config {
        on_warning: |warning| RECEIVED.lock().unwrap().push(warning),
        ..config(rank, 4, &address)
    });
    members(configs.collect(), |rank, communicator| {
        let communicator = communicator.expect("the group forms");
        if rank == 2 {
            communicator.log_line("first");
            communicator.log_line("second");
        }
        // Each line appears here and on rank 0, whichever direction of the ring was faster.
        let deadline = Instant::now() + Duration::from_secs(30);
        while RECEIVED.lock().unwrap().len() < 4 && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(10));
        }
        communicator
            .engine
            .run(Request::barrier(), &mut || false)
            .unwrap();
    });
    let mut received = RECEIVED.lock().unwrap().clone();
    received.sort();
    let texts: Vec<_> = received
        .iter()
        .map(|line| line.split(": ").nth(1))
        .collect();
    assert_eq!(texts, ["first", "first", "second", "second"].map(Some));
    assert!(received[0].starts_with("rank 2 on "));
}

#[test]
fn groups_follow_each_other_at_one_address() {
    let address = free_address();
    let configs = (0..2).map(|rank| config(rank, 2, &address)).collect();
    members(configs, move |rank, first| {
        let first = first.unwrap();
        all_reduce(&first, &mut [1.0; 4]).unwrap();
        if rank == 0 {
            // The other rank connects again before this rank has closed its first group.
            thread::sleep(Duration::from_millis(300));
        }
        first.close();
        let second = Communicator::connect(&config(rank, 2, &address), &mut || false).unwrap();
        all_reduce(&second, &mut [1.0; 4]).unwrap();
    });
}
