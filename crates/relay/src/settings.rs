// SPDX-License-Identifier: Apache-2.0

//! What can be chosen: for the whole relay, and for one service.

use std::time::Duration;

/// For the whole relay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Threads. Each accepts and carries on its own.
    pub workers: usize,
    /// TCP connections open at once. Each takes two descriptors; one that is too many is refused.
    pub connections: usize,
    /// UDP client flows at once. Each takes two descriptors; a new one beyond it ends the oldest.
    pub flows: usize,
    /// Pipes at once, over all workers. Where none is left bytes are copied instead.
    pub pipes: usize,
    /// A UDP flow without datagrams for so long is forgotten.
    pub udp_timeout: Duration,
    /// A connection is given to so many endpoints at most.
    pub attempts: u32,
    /// How long the first endpoint may take to answer; the next one twice as long, and so on. The last one left has all
    /// the time that is left.
    pub first_attempt: Duration,
    /// How long all attempts together may take.
    pub all_attempts: Duration,
    /// An endpoint that failed is set aside for so long; twice as long when it fails again, and so on.
    pub ejection: Duration,
    /// At most so long.
    pub longest_ejection: Duration,
    /// Connections to an endpoint that went are closed after this.
    pub drain: Duration,
    /// A connection of which one direction has ended, and nothing moves in the other, is closed after this.
    pub half_closed: Duration,
    /// Clients remembered at once, for each service with affinity.
    pub remembered: usize,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            workers: std::thread::available_parallelism().map_or(2, |count| count.get().min(8)),
            connections: 16_384,
            flows: 8_192,
            pipes: 1_024,
            udp_timeout: Duration::from_secs(30),
            attempts: 4,
            first_attempt: Duration::from_millis(250),
            all_attempts: Duration::from_secs(10),
            ejection: Duration::from_secs(1),
            longest_ejection: Duration::from_secs(60),
            drain: Duration::from_secs(600),
            half_closed: Duration::from_secs(900),
            remembered: 16_384,
        }
    }
}

impl Settings {
    /// Divides so many descriptors among connections, flows and pipes. A part stays free for everything else.
    pub fn within(mut self, descriptors: usize) -> Settings {
        let ours = descriptors.saturating_sub((descriptors / 8).clamp(64, 1024));
        self.pipes = (ours / 20).clamp(8, 4_096);
        let left = ours.saturating_sub(2 * self.pipes);
        self.flows = (left / 8).max(8);
        self.connections = (left.saturating_sub(2 * self.flows) / 2).max(8);
        self
    }

    /// How much of `total` one service may take, so that something is left for the others.
    pub(crate) fn share(total: usize) -> usize {
        (total - total / 4).max(1)
    }
}

/// How an endpoint is chosen among those that serve.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// One after the other.
    #[default]
    RoundRobin,
    /// The one with the fewest open connections for its weight.
    LeastConnections,
    /// The less busy of two drawn at random.
    RandomOfTwo,
    /// At random.
    Random,
    /// The same one for the same client address, as long as it is there.
    SourceHash,
}

/// For one service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServiceSettings {
    /// How an endpoint is chosen.
    pub algorithm: Algorithm,
    /// Clients are remembered for so long after their last connection.
    pub affinity: Option<Duration>,
    /// Tells the endpoint who the client is: PROXY protocol, version 2. TCP only.
    pub proxy_protocol: bool,
    /// Connections (or flows) at once; `None`: three quarters of what the relay has.
    pub connections: Option<u32>,
    /// Asks the endpoints whether they live.
    pub check: Option<Check>,
}

/// An active check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// What is asked.
    pub kind: CheckKind,
    /// How often.
    pub interval: Duration,
    /// How long an answer may take.
    pub timeout: Duration,
    /// So many failures in a row make an endpoint unhealthy; as many successes make it healthy again.
    pub threshold: u32,
}

/// What an active check asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CheckKind {
    /// Whether a TCP connection can be made.
    Connect,
    /// Whether a GET of this path is answered with a status from 200 to 399.
    Http(String),
}
