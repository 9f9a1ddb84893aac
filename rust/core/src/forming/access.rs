//! Access to a rank while its group forms, after the group has formed, and between groups.
//!
//! A running job has few slots and pauses after each stranger, so a flood costs it next to nothing.
//! The listener of a formed group yields to that of the next one, and asks initiators that want to
//! join to retry.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::forming::peers::initiates;
use crate::observe::own_state::OwnState;
use gradring_net::config::Config;
use gradring_net::host::host_name;
use gradring_net::session::credentials::Credentials;
pub(crate) use gradring_net::session::listener::{AccessPolicy, Initiator, Limits};
use gradring_net::session::turned_away::TurnedAway;
use gradring_proto::error::{Breach, Error, NotFormed, Result};
use gradring_proto::wire::handshake::{self, Hello, Purpose};

/// Limits of a formed group, for inquiries and a few members at a time. Handshakes of strangers,
/// with TLS up to a millisecond of computing each, take little of the job's time.
pub(crate) const FORMED: Limits = Limits {
    slots: 16,
    pause: Duration::from_millis(20),
    ..Limits::USUAL
};

/// Access policy of a rank.
pub(crate) struct GroupAccess {
    pub(crate) config: Config,
    pub(crate) credentials: Arc<Credentials>,
    pub(crate) own_state: Arc<OwnState>,
    /// Initiators that were turned away while the group forms.
    pub(crate) turned_away: TurnedAway,
}

impl AccessPolicy for GroupAccess {
    fn limits(&self) -> Limits {
        match self.lets_members_in() {
            true => Limits {
                handshake: self.config.conversation_limit(),
                ..Limits::USUAL
            },
            false => FORMED,
        }
    }

    fn yields_socket(&self) -> bool {
        self.own_state.is_formed()
    }

    fn turned_away(&self, initiator: &Initiator, error: &Error) {
        // Only a forming group reads these. Later initiators are not noted.
        if !self.lets_members_in() {
            return;
        }
        if let Some(message) = self.turned_away.note(initiator, error) {
            let (config, host) = (&self.config, host_name());
            (config.on_warning)(format!("rank {} on {host} {message}", config.rank));
        }
    }

    fn closes(&self) {
        self.own_state.gives_up();
    }
}

impl GroupAccess {
    pub(crate) fn new(
        config: &Config,
        credentials: &Arc<Credentials>,
        own_state: &Arc<OwnState>,
    ) -> Arc<Self> {
        Arc::new(Self {
            config: config.clone(),
            credentials: Arc::clone(credentials),
            own_state: Arc::clone(own_state),
            turned_away: TurnedAway::default(),
        })
    }

    /// Returns `true` while a group forms here.
    pub(crate) fn lets_members_in(&self) -> bool {
        !self.own_state.is_formed()
    }

    /// Checks that an authenticated initiator may connect as the rank and for the purpose that it
    /// claims.
    pub(crate) fn check(&self, hello: &Hello, deadline: Instant) -> Result<()> {
        let Config {
            rank,
            world_size,
            ref settings,
            ..
        } = self.config;
        // Other ranks may have finished forming the group before this one.
        let in_time = match hello.purpose {
            Purpose::OnDemand { .. } => !self.own_state.is_between_groups(),
            _ => self.lets_members_in(),
        };
        // An initiator of a newer generation learned sooner that this group has ended.
        if !in_time || hello.generation > self.config.generation {
            return Err(NotFormed::Busy.into());
        }
        if hello.generation < self.config.generation {
            return Err(NotFormed::OtherGeneration {
                initiator: hello.rank,
                theirs: hello.generation,
                responder: rank,
                ours: self.config.generation,
            }
            .into());
        }
        if hello.world_size != world_size {
            return Err(NotFormed::OtherWorldSize {
                initiator: hello.rank,
                theirs: hello.world_size,
                responder: rank,
                ours: world_size,
            }
            .into());
        }
        handshake::check_responder(hello.rank, hello.responder, rank)?;
        if hello.rank >= world_size || hello.rank == rank {
            return Err(NotFormed::NoSuchRank {
                initiator: hello.rank,
                responder: rank,
                world_size,
            }
            .into());
        }
        let welcome = match &hello.purpose {
            Purpose::Join(member) => {
                self.credentials
                    .check_job(&member.job, (hello.rank, rank))?;
                rank == 0
            }
            Purpose::Data { stream } | Purpose::OnDemand { stream, .. } => {
                *stream < settings.streams && initiates(hello.rank, rank, world_size)
            }
            Purpose::Control => (hello.rank + 1) % world_size == rank,
            // Other purposes have services of their own.
            _ => false,
        };
        if !welcome {
            let (initiator, responder) = (hello.rank, rank);
            return Err(Breach::NotExpected {
                initiator,
                responder,
            }
            .into());
        }
        if matches!(hello.purpose, Purpose::Join(_)) {
            return Ok(());
        }
        // The initiator's roster may have arrived before this rank's.
        let limit = deadline.saturating_duration_since(Instant::now());
        match self.own_state.group(limit) {
            Some(group) if group == hello.group => Ok(()),
            Some(_) => Err(NotFormed::OtherGroup {
                initiator: hello.rank,
                responder: rank,
            }
            .into()),
            None => Err(NotFormed::NoGroupYet { rank }.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gradring_proto::wire::handshake::GroupId;

    const RANKS: usize = 4;

    /// Answer of rank 2 of four in generation 1 to this greeting.
    fn answer(hello: Hello, has_group: bool) -> String {
        let config = Config {
            generation: 1,
            ..Config::new(2, RANKS, "")
        };
        let credentials = Arc::new(Credentials::of(&config).unwrap());
        let own_state = Arc::new(OwnState::new(2, RANKS, 1));
        if has_group {
            own_state.has_agreed(predecessor().group);
        }
        let access = GroupAccess::new(&config, &credentials, &own_state);
        match access.check(&hello, Instant::now()) {
            Ok(()) => "welcome".into(),
            Err(error) => error.to_string(),
        }
    }

    /// Greeting of its predecessor.
    fn predecessor() -> Hello {
        Hello {
            responder: 2,
            world_size: RANKS,
            generation: 1,
            ..Hello::sample(Purpose::Control)
        }
    }

    #[test]
    fn who_has_no_business_with_a_rank_is_told_why() {
        type Change = fn(&mut Hello);
        assert_eq!(answer(predecessor(), true), "welcome");
        let cases: [(Change, &str); 8] = [
            (|hello| hello.generation = 2, "has formed already"),
            (|hello| hello.generation = 0, "that of generation 1"),
            (|hello| hello.world_size = 3, "world size 3, rank 2 with 4"),
            (|hello| hello.responder = 3, "to rank 3 and reached rank 2"),
            (|hello| hello.rank = 4, "to rank 2 as rank 4 of 4"),
            (|hello| hello.rank = 2, "to rank 2 as rank 2 of 4"),
            (|hello| hello.rank = 0, "rank 0"),
            (
                |hello| hello.group = GroupId::NONE,
                "another group than rank 2",
            ),
        ];
        for (change, reason) in cases {
            let mut hello = predecessor();
            change(&mut hello);
            let answer = answer(hello, true);
            assert!(answer.contains(reason), "{answer}");
        }
        let answer = answer(predecessor(), false);
        assert!(
            answer.contains("rank 2 has not heard of a group yet"),
            "{answer}"
        );
    }
}
