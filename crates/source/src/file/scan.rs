// SPDX-License-Identifier: Apache-2.0

//! Which manifest files there are, and in which state.

use std::{
    collections::BTreeMap,
    fs::{self, Metadata},
    io,
    os::unix::fs::MetadataExt,
    path::Path,
    sync::Arc,
};

/// Tells one state of a file from another. Symbolic links are followed, so one that is turned elsewhere counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    device: u64,
    inode: u64,
    length: u64,
    modified: (i64, i64),
    /// Also moves when permissions do: a file that could not be read is then tried again.
    changed: (i64, i64),
}

impl Stamp {
    pub(super) fn of(metadata: &Metadata) -> Stamp {
        Stamp {
            device: metadata.dev(),
            inode: metadata.ino(),
            length: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

pub(super) type Files = BTreeMap<Arc<Path>, Stamp>;

/// The manifests of `target`, a file or a folder. An error if the folder (for a file: the folder it should be
/// in) cannot be looked into: then nothing is known about files, not even that they are gone.
pub(super) fn scan(target: &Path) -> io::Result<Files> {
    let mut files = Files::new();
    match fs::metadata(target) {
        Ok(metadata) if metadata.is_dir() => {
            for entry in fs::read_dir(target)? {
                let path = entry?.path();
                // One that goes while we look is gone; a link that leads nowhere is not there.
                if is_manifest(&path)
                    && let Ok(metadata) = fs::metadata(&path)
                    && metadata.is_file()
                {
                    files.insert(path.into(), Stamp::of(&metadata));
                }
            }
        }
        Ok(metadata) => {
            files.insert(target.into(), Stamp::of(&metadata));
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound && !looks_like_folder(target) => {
            fs::read_dir(folder_of(target))?;
        }
        Err(error) => return Err(error),
    }
    Ok(files)
}

/// `*.yaml`, `*.yml`, `*.json`, and no hidden file: editors keep their drafts in such.
pub(super) fn is_manifest(path: &Path) -> bool {
    let hidden = path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
    !hidden && has_extension(path)
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
        let files = scan(folder.path()).unwrap();
        let names: Vec<_> = files.keys().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["a.yaml", "b.yml", "c.JSON"]);
    }

    #[test]
    fn a_missing_file_is_known_to_be_missing_and_a_missing_folder_is_not() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(scan(&folder.path().join("a.yaml")).unwrap(), Files::new());
        assert!(scan(&folder.path().join("manifests")).is_err());
        assert!(scan(&folder.path().join("manifests/a.yaml")).is_err());
    }

    #[test]
    fn a_link_turned_elsewhere_is_another_state() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("one"), "x").unwrap();
        fs::write(path("two"), "x").unwrap();
        std::os::unix::fs::symlink("one", path("a.yaml")).unwrap();
        let before = scan(&path("a.yaml")).unwrap();
        fs::remove_file(path("a.yaml")).unwrap();
        std::os::unix::fs::symlink("two", path("a.yaml")).unwrap();
        assert_ne!(before, scan(&path("a.yaml")).unwrap());
    }
}
