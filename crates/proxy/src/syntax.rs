// SPDX-License-Identifier: Apache-2.0

//! Values as Go programs write them. Flags and configuration files that worked with kube-proxy were written
//! for Go's parsers, so their spelling is the standard here: durations need a unit, booleans have twelve
//! forms, IPv4 octets may have leading zeros.

use std::{fmt, net::SocketAddr, time::Duration};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
// The same tolerance for addresses in flags as in objects.
pub use source::lower::{parse_cidr, parse_ip};

/// A duration in nanoseconds. It has a sign, because a negative one parses and is refused later, by a
/// validation that names the field.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct GoDuration(pub i64);

impl GoDuration {
    /// No time at all.
    pub const ZERO: GoDuration = GoDuration(0);

    /// So many seconds.
    pub const fn from_secs(secs: i64) -> GoDuration {
        GoDuration(secs * 1_000_000_000)
    }

    /// Zero for a negative one.
    pub fn to_std(self) -> Duration {
        Duration::from_nanos(u64::try_from(self.0).unwrap_or(0))
    }

    /// `1h30m`, `250ms`, `0`, `-1.5s`; a number without unit is refused, except zero.
    pub fn parse(text: &str) -> Result<GoDuration, String> {
        let invalid = || format!("time: invalid duration {text:?}");
        let (negative, mut rest) = match text.strip_prefix(['-', '+']) {
            Some(rest) => (text.starts_with('-'), rest),
            None => (false, text),
        };
        if rest == "0" {
            return Ok(GoDuration::ZERO);
        }
        if rest.is_empty() {
            return Err(invalid());
        }
        let mut total: i128 = 0;
        while !rest.is_empty() {
            let number_end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
            let (number, tail) = rest.split_at(number_end);
            let unit_end = tail.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(tail.len());
            let (unit, next) = tail.split_at(unit_end);
            if unit.is_empty() {
                return Err(format!("time: missing unit in duration {text:?}"));
            }
            let unit_nanos = unit_nanos(unit)
                .ok_or_else(|| format!("time: unknown unit {unit:?} in duration {text:?}"))?;
            total += scaled(number, unit_nanos).ok_or_else(invalid)?;
            rest = next;
        }
        let total = if negative { -total } else { total };
        i64::try_from(total).map(GoDuration).map_err(|_| invalid())
    }
}

fn unit_nanos(unit: &str) -> Option<i128> {
    Some(match unit {
        "ns" => 1,
        "us" | "\u{b5}s" | "\u{3bc}s" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "m" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        _ => return None,
    })
}

/// `number` (digits with at most one point) times `unit`, cut at the nanosecond.
fn scaled(number: &str, unit: i128) -> Option<i128> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    // More digits than an i64 has nanoseconds cannot be meant, and would overflow below.
    if whole.len() + fraction.len() == 0 || whole.len() > 19 || fraction.contains('.') {
        return None;
    }
    let fraction = &fraction[..fraction.len().min(18)];
    let digits = |text: &str| if text.is_empty() { Some(0) } else { text.parse::<i128>().ok() };
    let power = 10_i128.pow(u32::try_from(fraction.len()).ok()?);
    Some(digits(whole)? * unit + digits(fraction)? * unit / power)
}

impl fmt::Display for GoDuration {
    /// As Go prints it: `15m0s`, `24h0m0s`, `1.5s`, `100ms`, `0s`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 < 0 {
            f.write_str("-")?;
        }
        let nanos = self.0.unsigned_abs();
        match nanos {
            0 => f.write_str("0s"),
            1..1_000 => write!(f, "{nanos}ns"),
            1_000..1_000_000 => write!(f, "{}\u{b5}s", decimal(nanos, 1_000)),
            1_000_000..1_000_000_000 => write!(f, "{}ms", decimal(nanos, 1_000_000)),
            _ => {
                let minutes = nanos / 60_000_000_000;
                if minutes >= 60 {
                    write!(f, "{}h", minutes / 60)?;
                }
                if minutes > 0 {
                    write!(f, "{}m", minutes % 60)?;
                }
                write!(f, "{}s", decimal(nanos % 60_000_000_000, 1_000_000_000))
            }
        }
    }
}

/// `value / unit` with as many digits after the point as it needs.
fn decimal(value: u64, unit: u64) -> String {
    let fraction = value % unit;
    if fraction == 0 {
        return (value / unit).to_string();
    }
    let width = unit.ilog10() as usize;
    format!("{}.{:0width$}", value / unit, fraction).trim_end_matches('0').to_owned()
}

impl Serialize for GoDuration {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for GoDuration {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<GoDuration, D::Error> {
        let text = <std::borrow::Cow<'_, str>>::deserialize(deserializer)?;
        GoDuration::parse(&text).map_err(de::Error::custom)
    }
}

/// The forms Go's `strconv.ParseBool` takes.
pub fn parse_bool(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

/// `IP:port` with a port of at least 1.
pub fn parse_socket(text: &str) -> Option<SocketAddr> {
    let (host, port) = text.rsplit_once(':')?;
    let host = match host.strip_prefix('[') {
        Some(inner) => inner.strip_suffix(']')?,
        None if host.contains(':') => return None,
        None => host,
    };
    let port: u16 = port.parse().ok().filter(|port| *port > 0)?;
    Some(SocketAddr::new(parse_ip(host)?, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_and_print_as_go_does() {
        let table = [
            ("0", "0s"),
            ("0s", "0s"),
            ("1s", "1s"),
            ("1.5s", "1.5s"),
            (".5s", "500ms"),
            ("15m", "15m0s"),
            ("24h", "24h0m0s"),
            ("1h30m", "1h30m0s"),
            ("100ms", "100ms"),
            ("1500us", "1.5ms"),
            ("3\u{b5}s", "3\u{b5}s"),
            ("-5s", "-5s"),
            ("+2m3s", "2m3s"),
            ("7ns", "7ns"),
        ];
        for (given, printed) in table {
            let parsed = GoDuration::parse(given).expect(given);
            assert_eq!(parsed.to_string(), printed, "{given}");
            assert_eq!(GoDuration::parse(printed), Ok(parsed), "{given} does not round-trip");
        }
        for bad in ["", "5", "-", "s", "1x", "1.2.3s", "1 s", "9999999h", "99999999999999999999s", "\u{661}s"]
        {
            assert!(GoDuration::parse(bad).is_err(), "{bad:?} was accepted");
        }
        assert_eq!(GoDuration::parse("5").unwrap_err(), "time: missing unit in duration \"5\"");
        assert_eq!(GoDuration::parse("-5s").expect("valid").to_std(), Duration::ZERO);
    }

    #[test]
    fn sockets_need_an_address_and_a_port() {
        let socket = |text: &str| parse_socket(text).map(|socket| socket.to_string());
        assert_eq!(socket("127.0.0.1:10249").as_deref(), Some("127.0.0.1:10249"));
        assert_eq!(socket("127.000.0.01:80").as_deref(), Some("127.0.0.1:80"));
        assert_eq!(socket("[::]:10256").as_deref(), Some("[::]:10256"));
        for bad in ["127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536", ":80", "::1:80", "[::1:80", "host:80"] {
            assert_eq!(socket(bad), None, "{bad}");
        }
    }

    #[test]
    fn booleans_take_the_twelve_forms_and_no_other() {
        for text in ["1", "t", "T", "true", "TRUE", "True"] {
            assert_eq!(parse_bool(text), Some(true));
        }
        for text in ["0", "f", "F", "false", "FALSE", "False"] {
            assert_eq!(parse_bool(text), Some(false));
        }
        for text in ["", "yes", "on", "tRUE", "2"] {
            assert_eq!(parse_bool(text), None, "{text}");
        }
    }
}
