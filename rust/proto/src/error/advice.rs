//! Advice: the end of an error's message, with the user's next step.

use super::{
    Error, ErrorKind, Lost, MAPPED, NotAgreed, NotFormed, NotServed, NotTrusted, Obstacle,
    Shortage, Unusable,
};

/// Advice for ranks that miss each other at the rendezvous.
const SAME_PLACE: &str = "look at the output of the ranks that are missing; each needs the same world size and \
                          rendezvous address, and no firewall on the way";
const GIVE_RANKS: &str =
    "give every process a rank of its own, and end what is left of an earlier start";

impl Error {
    /// The user's next step; empty if the sentence of the fact has it already.
    #[must_use]
    pub fn advice(&self) -> &'static str {
        match &self.kind {
            ErrorKind::Config(fact) => fact.advice(),
            ErrorKind::Rendezvous(fact) => fact.advice(),
            ErrorKind::Authentication(fact) => fact.advice(),
            ErrorKind::Mismatch { theirs, others }
                if theirs.contains(MAPPED) != others.contains(MAPPED) =>
            {
                "in one call, pass arrays of Communicator.empty on every rank or on none"
            }
            ErrorKind::Mismatch { .. } => {
                "make every rank call the same collectives, with the same shapes, in the same order"
            }
            ErrorKind::PeerLost(Lost::Left) => {
                "that rank ended well, but this one calls more: call evaluate() and the like on all ranks, and for \
                 uneven batches gradring.tensorflow.join(batches)"
            }
            ErrorKind::PeerLost(_) => {
                "look at that rank's own output for the cause, and restart the job"
            }
            // No rank is to blame if the caller's own wait was too short.
            ErrorKind::CollectiveTimeout(_) if self.blamed.is_none() => {
                "it goes on: wait again, or ask gradring doctor for whom it waits"
            }
            ErrorKind::CollectiveTimeout(_) => {
                "look at what that rank is doing; if it is only slow, raise stall_timeout (GRADRING_STALL_TIMEOUT_S)"
            }
            ErrorKind::Aborted(_) => "make a new communicator to go on",
            ErrorKind::Protocol(_) => {
                "check that all ranks run the same version of gradring and that nothing else uses its ports"
            }
            ErrorKind::Corrupted(_) => {
                "no rank used those bytes: restart the job; if it happens again, look at the memory, \
                 network cards and cables of these hosts"
            }
            ErrorKind::Misuse(_) => {
                "call the collectives of a communicator from one thread, or give each thread a \
                 communicator of its own; in a signal handler, set a flag or call close()"
            }
            ErrorKind::Exhausted(Shortage::NoWakeUp { .. }) => {
                "allow it in the seccomp profile of the container or sandbox"
            }
            ErrorKind::Exhausted(_) => "raise that limit and start again",
            ErrorKind::Membership(fact) => fact.advice(),
            ErrorKind::Parameters(fact) => fact.advice(),
        }
    }
}

impl Unusable {
    const fn advice(&self) -> &'static str {
        match self {
            Self::Root { .. } => "name a rank of this group",
            Self::NotAnother { .. } => "name another rank of this group",
            Self::Counts { .. } => "give each rank a count, which add up to the elements",
            Self::SettingsDiffer { .. } | Self::TransportsDiffer { .. } => {
                "start all ranks with the same settings"
            }
            // The sentences of these facts end with advice.
            Self::TooManyForReproducible { .. }
            | Self::Chunks { .. }
            | Self::NotConnected { .. }
            | Self::NotThere { .. }
            | Self::TooLongToSimulate { .. }
            | Self::NotAnAddressOfThisHost { .. }
            | Self::InitiatorWithoutTls
            | Self::OnlyTls
            | Self::ResponderWithoutTls
            | Self::AnswersWithoutTls => "",
            _ => "correct the setting and start again",
        }
    }
}

impl NotFormed {
    fn advice(&self) -> &'static str {
        match self {
            // The sentence about refused processes ends with advice.
            Self::MissingRanks { turned_away, .. } | Self::NotConnected { turned_away, .. }
                if !turned_away.is_empty() =>
            {
                ""
            }
            Self::MissingRanks { .. } => SAME_PLACE,
            Self::NotConnected { .. } | Self::NotFinished => {
                "let the ranks reach each other's ports (GRADRING_PORT chooses them), and look at the output of that \
                 rank"
            }
            Self::Unreachable { obstacle, .. } | Self::NobodyThere { obstacle, .. } => {
                obstacle.advice()
            }
            Self::OtherWorldSize { .. } | Self::NoSuchRank { .. } => {
                "start all ranks with the same world size"
            }
            Self::OtherRank { .. } => {
                "correct that name or address (TF_CONFIG, /etc/hosts, a forwarded port)"
            }
            Self::StreamTaken { .. } | Self::RankTaken { .. } => GIVE_RANKS,
            Self::Busy | Self::OtherGroup { .. } => {
                "end what is left of an earlier start, or choose another port for this job"
            }
            Self::OtherJob { .. } => {
                "choose another port for this job, or give all its ranks the same GRADRING_JOB_ID"
            }
            Self::OtherGeneration { .. } | Self::NoGroupYet { .. } => {
                "start this process again, so that it joins the group that there is now"
            }
            Self::PortInUse { .. } => {
                "end the program that holds the port, or choose another port (for several ranks on one host, \
                 GRADRING_PORT takes a range such as 29500-29515)"
            }
            Self::PortForbidden { .. } => "choose a port above 1023",
            Self::CannotListen { .. } => "correct the address, or choose another one",
            Self::Socket { .. } => "look at the network of this host, and start the job again",
            Self::NoLoopback { .. } => "type: ip link set lo up",
            Self::Refused => "look at its own output for the reason",
            Self::HandshakeBroke { .. } | Self::HandshakeSilent => {
                "look at the output of that process, and whether another program uses its port"
            }
            Self::CoordinatorEnded
            | Self::MemberEnded
            | Self::EndedEarly
            | Self::NoRoster
            | Self::LinkBroke { .. } => {
                "look at the output of that rank for the cause, and start the job again"
            }
            Self::CoordinatorSilent | Self::LinkSilent { .. } => {
                "look at that host and the network to it, and start the job again"
            }
        }
    }
}

impl Obstacle {
    const fn advice(self) -> &'static str {
        match self {
            Self::NoAddress => {
                "correct that name (GRADRING_RENDEZVOUS or TF_CONFIG), or let this host know it (/etc/hosts, DNS)"
            }
            Self::NobodyListens => {
                "nothing listens there: start that rank, look at its output, or correct the address"
            }
            Self::NoWay => {
                "check that address, that its host runs, and that no firewall is on the way"
            }
        }
    }
}

impl NotTrusted {
    const fn advice(&self) -> &'static str {
        match self {
            Self::TokensDiffer { .. } => {
                "give every rank the same token (GRADRING_TOKEN or GRADRING_TOKEN_FILE)"
            }
            _ => {
                "give every rank a certificate for its own name or address, from an authority that all have in \
                 tls.ca (GRADRING_TLS_CA)"
            }
        }
    }
}

impl NotAgreed {
    const fn advice(&self) -> &'static str {
        match self {
            Self::Minority { .. } => {
                "look at those hosts and the network to them; where the job goes on, start this process \
                 again to join it, and where it does not, start all from the last checkpoint"
            }
            Self::TurnedAway { .. } => {
                "give it the job's own GRADRING_TOKEN, GRADRING_JOB_ID, certificates and version, or other \
                 addresses in GRADRING_JOIN"
            }
            Self::NobodyToJoin { .. } => {
                "correct GRADRING_JOIN, or start the job again from its last checkpoint"
            }
            Self::TooFewWorkers { .. } => {
                "start more workers, or the job again from its last checkpoint"
            }
        }
    }
}

impl NotServed {
    fn advice(&self) -> &'static str {
        match self {
            Self::Greeting { error, .. } => match error.kind {
                ErrorKind::Rendezvous(_) => "check the addresses of the parameter servers",
                _ => error.advice(),
            },
            Self::Unreachable { .. } => {
                "look at that server's own output for the cause, and start it again with the same address \
                 and directory: the workers go on by themselves"
            }
            Self::AllLost { .. } => {
                "look at the workers' own output for the cause, and start them again"
            }
            Self::Held { .. } => {
                "look at what the other workers and servers do, and let all workers use several optimizers in \
                 one order; if they are only slow, raise stall_timeout (GRADRING_STALL_TIMEOUT_S)"
            }
            Self::WorkerTaken { .. } | Self::NoSuchWorker { .. } => {
                "give every worker an index of its own, and end what is left of an earlier run"
            }
            Self::ModelsDiffer { .. } => {
                "make every worker build the same model with the same optimizer; if a program has several \
                 optimizers, all workers must begin to use them in one order"
            }
            Self::RulesDiffer { .. } => "give all parameter servers the same rule",
            Self::NoLink { .. } => {
                "leave transport (GRADRING_TRANSPORT) at auto, which takes shared memory inside a host and \
                 TCP otherwise"
            }
            Self::StreamsDiffer { .. } => {
                "give all workers and parameter servers the same streams (GRADRING_STREAMS)"
            }
            Self::OtherServer { .. } | Self::NotAServer | Self::OnlyParameters => {
                "check the addresses of the parameter servers"
            }
            Self::DirectoryTaken { .. } | Self::OtherDirectory { .. } => {
                "give every parameter server a directory of its own"
            }
            Self::OtherNumber { .. } => {
                "start as many as that job had (gradring run --ps) to go on from its snapshots, or give \
                 another directory (snapshots=) to begin anew"
            }
            Self::OtherModel { .. } => {
                "train the same model to go on from its snapshots, or give another directory (snapshots=) \
                 to begin anew"
            }
            Self::Disk { .. } => "make room or give another directory, and start the server again",
            Self::NobodyCame { turned_away, .. } if !turned_away.is_empty() => "",
            Self::NobodyCame { .. } => {
                "start the workers with the servers' addresses, or raise timeout (GRADRING_TIMEOUT_S)"
            }
            Self::OutOfTurn { .. } => "call them in that order, from one thread",
            Self::WasSet { .. } => {
                "set or load weights before the first step of a job, or let the servers continue from snapshots"
            }
            Self::Closed { .. } => "make a new one to go on",
            Self::OfParent { .. } => {
                "use it there only, or start this process with multiprocessing's spawn"
            }
        }
    }
}
