// SPDX-License-Identifier: Apache-2.0

//! RFC 3339 times, as far as the API writes them.

/// Nanoseconds since 1970 of `2024-02-29T12:30:00.123456789Z` (or with an offset `+01:00`).
pub(crate) fn parse_nanos(text: &str) -> Option<i64> {
    let bytes = text.as_bytes();
    let punctuation = [(4, b'-'), (7, b'-'), (13, b':'), (16, b':')];
    if bytes.len() < 20 || punctuation.iter().any(|(at, byte)| bytes[*at] != *byte) {
        return None;
    }
    if !matches!(bytes[10], b'T' | b't' | b' ') {
        return None;
    }
    let (year, month, day) = (number(bytes, 0, 4)?, number(bytes, 5, 2)?, number(bytes, 8, 2)?);
    let (hour, minute, second) = (number(bytes, 11, 2)?, number(bytes, 14, 2)?, number(bytes, 17, 2)?);
    // 60 is a leap second.
    if !(1..=12).contains(&month) || !(1..=31).contains(&day) || hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    let (nanos, rest) = fraction(&bytes[19..])?;
    let seconds = days_from_civil(year, month, day) * 86_400 + hour * 3_600 + minute * 60 + second;
    seconds.checked_sub(offset_secs(rest)?)?.checked_mul(1_000_000_000)?.checked_add(nanos)
}

/// The reverse, to whole seconds, in UTC.
pub(crate) fn format(seconds: i64) -> String {
    let (days, rest) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let (year, month, day) = civil_from_days(days);
    let (hour, minute, second) = (rest / 3_600, rest % 3_600 / 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

fn number(bytes: &[u8], at: usize, digits: usize) -> Option<i64> {
    bytes
        .get(at..at + digits)?
        .iter()
        .try_fold(0, |number, byte| byte.is_ascii_digit().then(|| number * 10 + i64::from(byte - b'0')))
}

/// `.123Z` to nanoseconds and what follows; digits beyond the ninth are dropped.
fn fraction(bytes: &[u8]) -> Option<(i64, &[u8])> {
    let Some(digits) = bytes.strip_prefix(b".") else {
        return Some((0, bytes));
    };
    let count = digits.iter().take_while(|byte| byte.is_ascii_digit()).count();
    if count == 0 {
        return None;
    }
    let used = count.min(9);
    let nanos = number(digits, 0, used)? * 10_i64.pow(9 - used as u32);
    Some((nanos, &digits[count..]))
}

fn offset_secs(bytes: &[u8]) -> Option<i64> {
    match bytes {
        [b'Z' | b'z'] => Some(0),
        [sign @ (b'+' | b'-'), _, _, b':', _, _] => {
            let (hours, minutes) = (number(bytes, 1, 2)?, number(bytes, 4, 2)?);
            let secs = hours * 3_600 + minutes * 60;
            (hours <= 23 && minutes <= 59).then_some(if *sign == b'-' { -secs } else { secs })
        }
        _ => None,
    }
}

/// Days since 1970 in the proleptic Gregorian calendar. Years are counted from March, so that the leap day is
/// the last of its year.
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

fn civil_from_days(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let (era, day_of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_as_the_api_writes_them() {
        for (text, nanos) in [
            ("1970-01-01T00:00:00Z", 0),
            ("1970-01-01T01:00:00+01:00", 0),
            ("1969-12-31T23:59:59Z", -1_000_000_000),
            ("2024-02-29T12:30:00.5Z", 1_709_209_800_500_000_000),
            ("2026-08-01T00:00:00.123456789Z", 1_785_542_400_123_456_789),
            ("2026-08-01T00:00:00.1234567891234Z", 1_785_542_400_123_456_789),
            ("2000-03-01T00:00:00-00:30", 951_870_600_000_000_000),
        ] {
            assert_eq!(parse_nanos(text), Some(nanos), "{text}");
        }
    }

    #[test]
    fn what_is_no_time() {
        for text in [
            "",
            "yesterday",
            "2024-02-29",
            "2024-02-29T12:30:00",
            "2024-13-01T00:00:00Z",
            "2024-00-01T00:00:00Z",
            "2024-01-01T24:00:00Z",
            "2024-01-01T00:00:00.Z",
            "2024-01-01T00:00:00+1:00",
            "2024-01-01T00:00:00é",
            "9999-99-99T99:99:99Z",
            "9999-12-31T23:59:59Z0",
        ] {
            assert_eq!(parse_nanos(text), None, "{text}");
        }
        // Beyond what 64 bits of nanoseconds hold.
        assert_eq!(parse_nanos("9999-12-31T23:59:59Z"), None);
    }

    #[test]
    fn formatting_is_the_reverse() {
        for seconds in [0, 951_868_800, 1_709_209_800, 1_785_542_400, -1, 4_102_444_800] {
            assert_eq!(parse_nanos(&format(seconds)), Some(seconds * 1_000_000_000), "{seconds}");
        }
    }
}
