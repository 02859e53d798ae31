// SPDX-License-Identifier: Apache-2.0

//! The machine a run was made on, without anything that names it.

use std::{
    fs,
    time::{SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Machine {
    pub cores: usize,
    pub processor: String,
    pub memory_mib: u64,
    pub kernel: String,
    pub load: Load,
}

/// The three averages of /proc/loadavg.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Load {
    pub one_minute: f64,
    pub five_minutes: f64,
    pub fifteen_minutes: f64,
}

impl Load {
    pub fn now() -> Load {
        let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let mut averages = text.split(' ').map_while(|word| word.parse().ok());
        let mut next = || averages.next().unwrap_or(0.0);
        Load { one_minute: next(), five_minutes: next(), fifteen_minutes: next() }
    }
}

impl Machine {
    pub fn this() -> Machine {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let processor = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let memory_kib = meminfo.split_whitespace().nth(1).and_then(|word| word.parse::<u64>().ok());
        Machine {
            cores: std::thread::available_parallelism().map_or(1, |cores| cores.get()),
            processor: processor
                .map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.to_owned()),
            memory_mib: memory_kib.unwrap_or(0) / 1024,
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned(),
            load: Load::now(),
        }
    }
}

/// Today in UTC, as 2026-01-31.
pub fn today() -> String {
    let days = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() / 86_400);
    let (year, month, day) = civil(days);
    format!("{year:04}-{month:02}-{day:02}")
}

/// The date `days` after 1970-01-01. Years are counted from March, so that the leap day comes last.
fn civil(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::civil;

    #[test]
    fn days_become_dates() {
        assert_eq!(civil(0), (1970, 1, 1));
        assert_eq!(civil(59), (1970, 3, 1));
        assert_eq!(civil(11_016), (2000, 2, 29));
        assert_eq!(civil(19_782), (2024, 2, 29));
        assert_eq!(civil(20_773), (2026, 11, 16));
    }
}
