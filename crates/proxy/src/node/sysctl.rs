// SPDX-License-Identifier: Apache-2.0

//! Kernel settings, read and written as files below `/proc/sys`.
//!
//! What lies below `net` belongs to the network namespace of the calling thread.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// The files with the kernel's settings; in tests, any folder that looks like the root.
#[derive(Clone, Debug)]
pub struct Sysctls {
    root: PathBuf,
}

impl Sysctls {
    /// Those of this machine.
    pub fn host() -> Sysctls {
        Sysctls::below("/")
    }

    /// Those below another root.
    pub fn below(root: impl Into<PathBuf>) -> Sysctls {
        Sysctls { root: root.into() }
    }

    /// A file of this machine that is no setting: `proc/net/ip_tables_names`.
    pub fn file(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// The value of `net/ipv4/ip_forward`, without white space around it.
    pub fn read(&self, name: &str) -> io::Result<String> {
        fs::read_to_string(self.path(name)).map(|text| text.trim().to_owned())
    }

    /// The value where it is a whole number; `None` where it cannot be read.
    pub fn number(&self, name: &str) -> Option<u64> {
        self.read(name).ok()?.parse().ok()
    }

    /// Writes one, without looking at what was there.
    pub fn write(&self, name: &str, value: u64) -> io::Result<()> {
        // Never creates a file: what the kernel does not have, it cannot be given.
        let mut file = fs::OpenOptions::new().write(true).open(self.path(name))?;
        io::Write::write_all(&mut file, value.to_string().as_bytes())
    }

    /// The names of the folders in `net/ipv4/conf`, that is of the interfaces, and `all` and `default`.
    pub fn folders(&self, name: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.path(name)) else { return Vec::new() };
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut names: Vec<String> = names.collect();
        names.sort_unstable();
        names
    }

    /// How many CPUs of this machine are switched on, whatever part of them this process may use.
    pub fn cpus(&self) -> u64 {
        let online = fs::read_to_string(self.file("sys/devices/system/cpu/online"));
        let counted = online.ok().and_then(|text| count(text.trim()));
        let usable = || std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
        counted.unwrap_or_else(usable)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.join("proc/sys").join(Path::new(name))
    }
}

/// How many numbers `0-3,5` names.
fn count(ranges: &str) -> Option<u64> {
    let mut total = 0;
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        total += u64::from(last.checked_sub(first)?) + 1;
    }
    Some(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_are_counted_as_the_kernel_lists_them() {
        for (text, expected) in
            [("0", Some(1)), ("0-3", Some(4)), ("0-3,5,8-9", Some(7)), ("", None), ("3-1", None), ("x", None)]
        {
            assert_eq!(count(text), expected, "{text}");
        }
        assert!(Sysctls::host().cpus() >= 1);
        assert!(Sysctls::below("/nonexistent").cpus() >= 1);
    }

    #[test]
    fn settings_are_files() {
        let root = tempfile::tempdir().expect("a folder");
        let folder = root.path().join("proc/sys/net/ipv4/conf/eth0");
        fs::create_dir_all(&folder).expect("made");
        fs::write(folder.join("rp_filter"), "1\n").expect("written");
        let sysctls = Sysctls::below(root.path());
        assert_eq!(sysctls.number("net/ipv4/conf/eth0/rp_filter"), Some(1));
        sysctls.write("net/ipv4/conf/eth0/rp_filter", 2).expect("there");
        assert_eq!(sysctls.number("net/ipv4/conf/eth0/rp_filter"), Some(2));
        assert_eq!(sysctls.folders("net/ipv4/conf"), ["eth0"]);
        let missing = sysctls.write("net/ipv4/nothing", 1).expect_err("it is not there");
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        assert!(!folder.join("../../nothing").exists(), "nothing is created");
    }
}
