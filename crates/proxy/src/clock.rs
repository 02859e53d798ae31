// SPDX-License-Identifier: Apache-2.0

//! Points in time as text.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A point in time split into calendar fields, UTC.
struct Civil {
    year: i64,
    month: u64,
    day: u64,
    hour: u64,
    minute: u64,
    second: u64,
    nanos: u32,
}

/// Times before 1970 are told as 1970: they mean that the clock was never set.
fn civil(time: SystemTime) -> Civil {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    let (days, rest) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    // Days counted from 1 March 0000, in eras of 400 years: leap days fall on the end of a year.
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * of_year + 2) / 153;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    let year = i64::try_from(era * 400 + year_of_era).unwrap_or(i64::MAX - 1) + i64::from(month <= 2);
    Civil {
        year,
        month,
        day: of_year - (153 * march_month + 2) / 5 + 1,
        hour: rest / 3_600,
        minute: rest / 60 % 60,
        second: rest % 60,
        nanos: since.subsec_nanos(),
    }
}

/// As Go writes a time in JSON: `2026-08-01T12:00:00.5Z`, as many digits of the second as it needs.
pub fn rfc3339(time: SystemTime) -> String {
    let Civil { year, month, day, hour, minute, second, nanos } = civil(time);
    let fraction = match nanos {
        0 => String::new(),
        nanos => format!(".{nanos:09}").trim_end_matches('0').to_owned(),
    };
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}{fraction}Z")
}

/// With six digits of the second, as the API wants it of events: `2026-08-01T12:00:00.500000Z`.
pub fn rfc3339_micro(time: SystemTime) -> String {
    let Civil { year, month, day, hour, minute, second, nanos } = civil(time);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{:06}Z", nanos / 1_000)
}

/// As klog heads a line: `0801 12:00:00.500000`.
pub fn klog(time: SystemTime) -> String {
    let Civil { month, day, hour, minute, second, nanos, .. } = civil(time);
    format!("{month:02}{day:02} {hour:02}:{minute:02}:{second:02}.{:06}", nanos / 1_000)
}

/// As `date` prints it: `Sat Aug  1 12:00:00 UTC 2026`.
pub fn unix_date(time: SystemTime) -> String {
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let Civil { year, month, day, hour, minute, second, .. } = civil(time);
    let days = time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs() / 86_400;
    let (weekday, month) = (DAYS[(days % 7) as usize], MONTHS[month as usize - 1]);
    format!("{weekday} {month} {day:>2} {hour:02}:{minute:02}:{second:02} UTC {year}")
}

/// Seconds since 1970, for metrics.
pub fn unix_secs(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right() {
        let at = |secs: u64, nanos: u32| UNIX_EPOCH + Duration::new(secs, nanos);
        for (secs, nanos, text) in [
            (0, 0, "1970-01-01T00:00:00Z"),
            (951_782_400, 0, "2000-02-29T00:00:00Z"),
            (951_868_799, 999_999_999, "2000-02-29T23:59:59.999999999Z"),
            (951_868_800, 0, "2000-03-01T00:00:00Z"),
            (1_709_164_800, 500_000_000, "2024-02-29T00:00:00.5Z"),
            (1_767_225_599, 1_000, "2025-12-31T23:59:59.000001Z"),
            (1_767_225_600, 0, "2026-01-01T00:00:00Z"),
            (4_107_542_400, 0, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(rfc3339(at(secs, nanos)), text);
        }
        assert_eq!(klog(at(1_767_225_599, 1_000)), "1231 23:59:59.000001");
        assert_eq!(rfc3339_micro(at(1_767_225_599, 0)), "2025-12-31T23:59:59.000000Z");
        assert_eq!(unix_date(at(1_785_585_600, 0)), "Sat Aug  1 12:00:00 UTC 2026");
        assert_eq!(rfc3339(UNIX_EPOCH - Duration::from_secs(5)), "1970-01-01T00:00:00Z");
    }
}
