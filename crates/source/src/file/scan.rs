// SPDX-License-Identifier: Apache-2.0

//! Which manifest files there are, and in which state.

use std::{
    ffi::{OsStr, OsString},
    fs::{self, Metadata},
    hash::{DefaultHasher, Hash, Hasher},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use hashbrown::HashMap;

/// A file's name in its folder. All files are in one.
pub(super) type Name = Arc<OsStr>;

/// Tells one state of a file from another: a hash of device, inode, length and times. Symbolic links are followed,
/// so one that is turned elsewhere counts. So do permissions: a file that could not be read is then tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp(u64);

impl Stamp {
    /// Of a file that is there, and was not looked at any closer.
    pub(super) const UNSEEN: Stamp = Stamp(0);

    pub(super) fn of(metadata: &Metadata) -> Stamp {
        let mut hasher = DefaultHasher::new();
        let modified = (metadata.mtime(), metadata.mtime_nsec());
        let changed = (metadata.ctime(), metadata.ctime_nsec());
        (metadata.dev(), metadata.ino(), metadata.len(), modified, changed).hash(&mut hasher);
        Stamp(hasher.finish())
    }
}

#[cfg(test)]
impl From<u64> for Stamp {
    fn from(number: u64) -> Stamp {
        Stamp(number)
    }
}

/// What there is.
#[derive(Debug, Default)]
pub(super) struct Scan {
    /// The folder the files are in, and which one that is: another may be put in its place.
    pub folder: PathBuf,
    pub identity: Identity,
    pub files: HashMap<Name, Stamp>,
    /// Something in the folder that does not count, and is not hidden.
    pub other: Option<OsString>,
    /// The kernel tells of every change, to those who ask it: the folder is on this machine, and none of its files is
    /// a link to elsewhere.
    pub told: bool,
}

/// How closely the files of a folder are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Detail {
    /// Which there are. Of files that are all going to be read their state is told by who reads them, and need not be asked
    /// for one by one before anything is read.
    Names,
    /// Their state as well.
    States,
}

/// Device and inode of a folder.
pub(super) type Identity = Option<(u64, u64)>;

/// Which folder is at this path.
pub(super) fn identity(folder: &Path) -> Identity {
    let metadata = fs::metadata(folder).ok()?;
    metadata.is_dir().then(|| (metadata.dev(), metadata.ino()))
}

/// The state of one file, or nothing if it is not there.
pub(super) fn stamp(path: &Path) -> Option<Stamp> {
    let metadata = fs::metadata(path).ok()?;
    metadata.is_file().then(|| Stamp::of(&metadata))
}

/// The manifests of `target`, a file or a folder. An error if the folder (for a file: the folder it should be
/// in) cannot be looked into: then nothing is known about files, not even that they are gone.
pub(super) fn scan(target: &Path, detail: Detail) -> io::Result<Scan> {
    let is_folder = match fs::metadata(target) {
        Ok(metadata) => metadata.is_dir(),
        Err(error) if error.kind() == io::ErrorKind::NotFound && !looks_like_folder(target) => false,
        Err(error) => return Err(error),
    };
    let folder = if is_folder { target } else { folder_of(target) };
    let (files, told) = (HashMap::new(), is_local(folder));
    let mut scan = Scan { folder: folder.to_owned(), identity: identity(folder), files, other: None, told };
    let entries = fs::read_dir(folder)?;
    if !is_folder {
        let name = target.file_name().unwrap_or_default();
        // Named by the operator, so it may also be a pipe.
        let found = fs::metadata(target).ok().filter(|metadata| !metadata.is_dir());
        scan.told &= !target.is_symlink();
        scan.files.extend(found.map(|metadata| (name.into(), Stamp::of(&metadata))));
        return Ok(scan);
    }
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        if !is_manifest(Path::new(&name)) {
            if scan.other.is_none() && !is_hidden(&name) {
                scan.other = Some(name);
            }
            continue;
        }
        // One that goes while we look is gone; a link that leads nowhere is not there. Of what is no link the state is
        // to be had without walking the path once more, which is half of the cost.
        let kind = entry.file_type().ok();
        if detail == Detail::Names && kind.is_some_and(|kind| kind.is_file()) {
            scan.files.insert(name.into(), Stamp::UNSEEN);
            continue;
        }
        let is_link = kind.is_some_and(|kind| kind.is_symlink());
        let found = if is_link { fs::metadata(entry.path()) } else { entry.metadata() };
        scan.told &= !is_link;
        let stamp = found.ok().filter(Metadata::is_file).map(|metadata| Stamp::of(&metadata));
        scan.files.extend(stamp.map(|stamp| (name.into(), stamp)));
    }
    Ok(scan)
}

/// Whether nobody but this machine can change what is there.
fn is_local(folder: &Path) -> bool {
    /// ext2 to ext4, xfs, btrfs, f2fs, tmpfs, overlayfs: f_type of statfs(2).
    const LOCAL: [u32; 6] = [0x0000_ef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010, 0x0102_1994, 0x794c_7630];
    rustix::fs::statfs(folder).is_ok_and(|found| LOCAL.contains(&(found.f_type as u32)))
}

/// `*.yaml`, `*.yml`, `*.json`, and no hidden file: editors keep their drafts in such.
pub(super) fn is_manifest(path: &Path) -> bool {
    path.file_name().is_some_and(|name| !is_hidden(name)) && has_extension(path)
}

fn is_hidden(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(b".")
}

fn has_extension(path: &Path) -> bool {
    let extension = path.extension().unwrap_or_default();
    ["yaml", "yml", "json"].iter().any(|known| extension.eq_ignore_ascii_case(known))
}

/// What a path that does not exist is meant to be can only be guessed from its name.
pub(super) fn looks_like_folder(target: &Path) -> bool {
    !has_extension(target)
}

/// The folder a path is in.
pub(super) fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder.as_os_str().is_empty() => Path::new("."),
        Some(folder) => folder,
        None => path,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_manifests_count() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["a.yaml", "b.yml", "c.JSON", "d.txt", ".e.yaml", "f.yaml~", "4913", ".#g.yaml"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        fs::create_dir(folder.path().join("h.yaml")).unwrap();
        std::os::unix::fs::symlink("nowhere", folder.path().join("i.yaml")).unwrap();
        for detail in [Detail::Names, Detail::States] {
            let files = scan(folder.path(), detail).unwrap().files;
            let mut names: Vec<_> = files.keys().map(|name| name.to_str().unwrap()).collect();
            names.sort_unstable();
            assert_eq!(names, ["a.yaml", "b.yml", "c.JSON"]);
            let is_unseen = |stamp: &Stamp| *stamp == Stamp::UNSEEN;
            assert_eq!(files.values().all(is_unseen), detail == Detail::Names);
        }
    }

    #[test]
    fn links_and_other_machines_change_without_a_word() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a.yaml"), "x").unwrap();
        assert_eq!(scan(folder.path(), Detail::States).unwrap().told, is_local(folder.path()));
        std::os::unix::fs::symlink("a.yaml", folder.path().join("b.yaml")).unwrap();
        let found = scan(folder.path(), Detail::States).unwrap();
        assert!(!found.told, "a link");
        assert_eq!(
            found.files[&*Name::from(OsStr::new("b.yaml"))],
            found.files[&*Name::from(OsStr::new("a.yaml"))]
        );
        assert!(!scan(&folder.path().join("b.yaml"), Detail::States).unwrap().told);
        assert!(!is_local(Path::new("/proc")), "what is not known to be local is not taken for it");
    }

    #[test]
    fn a_missing_file_is_known_to_be_missing_and_a_missing_folder_is_not() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(scan(&folder.path().join("a.yaml"), Detail::States).unwrap().files.len(), 0);
        assert!(scan(&folder.path().join("manifests"), Detail::States).is_err());
        assert!(scan(&folder.path().join("manifests/a.yaml"), Detail::States).is_err());
    }

    #[test]
    fn a_link_turned_elsewhere_is_another_state() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("one"), "x").unwrap();
        fs::write(path("two"), "x").unwrap();
        std::os::unix::fs::symlink("one", path("a.yaml")).unwrap();
        let before = scan(&path("a.yaml"), Detail::States).unwrap().files;
        fs::remove_file(path("a.yaml")).unwrap();
        std::os::unix::fs::symlink("two", path("a.yaml")).unwrap();
        assert_ne!(before, scan(&path("a.yaml"), Detail::States).unwrap().files);
    }
}
