// SPDX-License-Identifier: Apache-2.0

//! What a responder says about itself and its peer, and how it is written on the wire: one line.

use std::{fmt, net::SocketAddr, str::FromStr};

/// One line: the number of the question, who answers, on which address, and which source it saw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The pod, node or host by name.
    pub by: String,
    /// The address and port it was reached on, as it knows them.
    pub at: SocketAddr,
    /// The address and port it takes for the client's.
    pub source_seen: SocketAddr,
    /// Repeated from the question, so that a late answer to an earlier one is not taken for this one's.
    pub(crate) question: u32,
}

impl fmt::Display for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {} {}", self.question, self.by, self.at, self.source_seen)
    }
}

impl FromStr for Reply {
    type Err = Malformed;

    fn from_str(line: &str) -> Result<Reply, Malformed> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [question, by, at, source_seen] = words.as_slice() else { return Err(Malformed) };
        Ok(Reply {
            by: (*by).to_owned(),
            at: at.parse().map_err(|_| Malformed)?,
            source_seen: source_seen.parse().map_err(|_| Malformed)?,
            question: question.parse().map_err(|_| Malformed)?,
        })
    }
}

/// Not a line of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let reply = Reply {
            by: "a1".to_owned(),
            at: "10.244.1.1:8080".parse().unwrap(),
            source_seen: "[fd00::1]:40000".parse().unwrap(),
            question: 7,
        };
        assert_eq!(reply.to_string().parse(), Ok(reply));
        for line in ["", "7 a1 10.244.1.1:8080", "x a1 10.244.1.1:8080 [fd00::1]:1", "7 a1 here there"] {
            assert_eq!(line.parse::<Reply>(), Err(Malformed), "{line}");
        }
    }
}
