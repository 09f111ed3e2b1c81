//! New folders, and folders that are refused with a sentence.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use common::{MINUTE, flush, get, prefix, put, small, tokens};
use kv_store::{Access, Config, DropReason, Get, OpenError, Prune, Put, Store};

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path =
            std::env::temp_dir().join(format!("kv-store-folder-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).unwrap();
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn refusal(path: &Path, config: Config) -> String {
    match Store::open(path, config) {
        Ok(_) => panic!("{} was opened", path.display()),
        Err(error) => error.to_string(),
    }
}

#[test]
fn a_new_folder_is_private_and_opens_again() {
    let scratch = Scratch::new("new");
    let path = scratch.0.join("store");
    let tokens = tokens(0, 1);
    let block = prefix(&tokens).block(0);
    let store = Store::open(&path, small()).unwrap();
    put(&store, &block, 1000);
    store.sync().unwrap();
    assert!(store.close(MINUTE));
    for entry in fs::read_dir(&path).unwrap() {
        let entry = entry.unwrap();
        assert_eq!(
            entry.metadata().unwrap().permissions().mode() & 0o777,
            0o600,
            "{:?}",
            entry.path()
        );
    }
    assert_eq!(
        fs::metadata(&path).unwrap().permissions().mode() & 0o777,
        0o700
    );
    let store = Store::open(&path, small()).unwrap();
    assert_eq!(store.stats().counters.loaded, 1);
    assert_eq!(get(&store, &block, 1000), Get::Hit);
}

#[test]
fn folders_that_others_can_change_are_refused() {
    let scratch = Scratch::new("mode");
    let path = scratch.0.join("store");
    drop(Store::open(&path, small()).unwrap());
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let error = refusal(&path, small());
    assert!(
        error.contains("mode 755") && error.contains("chmod 700"),
        "{error}"
    );
    fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
    if std::os::unix::fs::chown(&path, Some(12345), None).is_ok() {
        let error = refusal(&path, small());
        assert!(error.contains("belongs to user 12345"), "{error}");
    }
}

#[test]
fn a_folder_of_something_else_is_never_to_be_made_private() {
    let scratch = Scratch::new("advice");
    let path = scratch.0.join("tmp");
    fs::create_dir(&path).unwrap();
    for (name, text, expected) in [
        (None, "", "does not exist yet"),
        (Some("lock"), "", "does not exist yet"),
        (Some("thesis.txt"), "text", "not a KV store"),
        (
            Some("format"),
            "A4, margins of 2 cm, one and a half lines",
            "not a KV store",
        ),
        (Some("format"), "pyengine", "not a KV store"),
        (Some("format"), "", "not a KV store"),
    ] {
        if let Some(name) = name {
            fs::write(path.join(name), text).unwrap();
        }
        for mode in [0o755, 0o1777, 0o750, 0o705, 0o770] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            for access in [Access::Read, Access::Write, Access::WriteOrRead] {
                let config = Config { access, ..small() };
                let error = refusal(&path, config);
                assert!(error.contains(expected), "{name:?} {mode:o}: {error}");
                assert!(!error.contains("chmod"), "{name:?} {mode:o}: {error}");
            }
        }
    }
    // A marker that another user put there is none.
    fs::write(path.join("format"), "pyengine kv-store\nformat 1\n").unwrap();
    assert!(refusal(&path, small()).contains("chmod 700"));
    if std::os::unix::fs::chown(path.join("format"), Some(12345), None).is_ok() {
        assert!(refusal(&path, small()).contains("not a KV store"));
    }
}

#[test]
fn symbolic_links_are_refused() {
    let scratch = Scratch::new("link");
    let (path, link) = (scratch.0.join("store"), scratch.0.join("link"));
    Store::open(&path, small()).unwrap();
    symlink(&path, &link).unwrap();
    assert!(matches!(
        Store::open(&link, small()),
        Err(OpenError::Symlink { .. })
    ));
    // Inside the folder too: neither the lock nor a segment is followed elsewhere.
    let target = scratch.0.join("target");
    fs::write(&target, "precious").unwrap();
    fs::remove_file(path.join("lock")).unwrap();
    symlink(&target, path.join("lock")).unwrap();
    assert!(matches!(
        Store::open(&path, small()),
        Err(OpenError::Io { .. })
    ));
    fs::remove_file(path.join("lock")).unwrap();
    symlink(&target, path.join("00000000.data")).unwrap();
    let store = Store::open(&path, small()).unwrap();
    put(&store, &prefix(&tokens(0, 1)).block(0), 1000);
    flush(&store);
    drop(store);
    assert_eq!(fs::read_to_string(&target).unwrap(), "precious");
}

/// However the link is spelt. A link before the last name is followed, as that of any path.
#[test]
fn a_slash_or_a_dot_after_a_symbolic_link_changes_nothing() {
    let scratch = Scratch::new("slash");
    let (path, link) = (scratch.0.join("store"), scratch.0.join("link"));
    drop(Store::open(&path, small()).unwrap());
    symlink(&path, &link).unwrap();
    let link = link.to_str().unwrap();
    for spelt in [
        "",
        "/",
        "//",
        "/.",
        "/./",
        "/././/",
        "/../link/",
        "/../link/.",
    ] {
        let opened = Store::open(format!("{link}{spelt}"), small());
        let error = opened.err().map(|error| error.to_string());
        let error = error.unwrap_or_else(|| panic!("link{spelt} was opened"));
        assert!(error.contains("is a symbolic link"), "link{spelt}: {error}");
    }
    let path = path.to_str().unwrap();
    for spelt in ["", "/", "/.", "/./", "/../store", "/../link/../store/"] {
        let opened = Store::open(format!("{path}{spelt}"), small());
        assert!(opened.is_ok(), "store{spelt}: {:?}", opened.err());
    }
    symlink(&scratch.0, scratch.0.join("parent")).unwrap();
    assert!(Store::open(scratch.0.join("parent/store/"), small()).is_ok());
    let file = scratch.0.join("file");
    fs::write(&file, "").unwrap();
    for spelt in ["", "/", "/."] {
        let error = refusal(Path::new(&format!("{}{spelt}", file.display())), small());
        assert!(error.contains("Not a directory"), "{error}");
    }
    for access in [Access::Write, Access::Read, Access::WriteOrRead] {
        let error = refusal(Path::new(""), Config { access, ..small() });
        assert!(error.contains("the name of its folder is empty"), "{error}");
    }
}

fn reading() -> Config {
    Config {
        access: Access::Read,
        ..small()
    }
}

#[test]
fn a_reader_makes_no_folder_and_no_file() {
    let scratch = Scratch::new("reads");
    let path = scratch.0.join("store");
    let error = refusal(&path, reading());
    assert!(error.contains("No such file or directory"), "{error}");
    assert!(!path.exists());
    let tokens = tokens(0, 1);
    let block = prefix(&tokens).block(0);
    let store = Store::open(&path, small()).unwrap();
    put(&store, &block, 1000);
    assert!(store.close(MINUTE));
    drop(store);
    fs::remove_file(path.join("lock")).unwrap();
    // A torn tail, as of a crash: a writer would cut it.
    let data = path.join("00000000.data");
    let mut torn = fs::read(&data).unwrap();
    torn.extend([7; 100]);
    fs::write(&data, &torn).unwrap();
    let list = || {
        let entries = fs::read_dir(&path).unwrap().map(|entry| entry.unwrap());
        let entry = |entry: fs::DirEntry| (entry.file_name(), fs::read(entry.path()).unwrap());
        let mut all: Vec<_> = entries.map(entry).collect();
        all.sort();
        all
    };
    let before = list();
    let reader = Store::open(&path, reading()).unwrap();
    assert_eq!(get(&reader, &block, 1000), Get::Hit);
    assert_eq!(put(&reader, &block, 1000), Put::Known);
    assert_eq!(
        put(&reader, &prefix(&[9; 16]).block(0), 1000),
        Put::Dropped(DropReason::ReadOnly)
    );
    reader.refresh().unwrap();
    assert_eq!(reader.verify().whole, 1);
    assert_eq!((reader.prune(Prune::All), reader.evict(1)), (0, 0));
    reader.sync().unwrap();
    assert!(reader.flush(MINUTE) && reader.close(MINUTE));
    drop(reader);
    assert_eq!(list(), before);
}

#[test]
fn folders_of_something_else_are_refused_and_left_alone() {
    let scratch = Scratch::new("else");
    let path = scratch.0.join("home");
    fs::create_dir(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
    fs::write(path.join("thesis.txt"), "text").unwrap();
    let error = refusal(&path, small());
    assert!(error.contains("not a KV store"), "{error}");
    assert_eq!(fs::read_dir(&path).unwrap().count(), 1);
    let file = scratch.0.join("file");
    fs::write(&file, "").unwrap();
    assert!(matches!(
        Store::open(&file, small()),
        Err(OpenError::Io { .. })
    ));
    assert!(matches!(
        Store::open(scratch.0.join("no/such"), small()),
        Err(OpenError::Io { .. })
    ));
}

#[test]
fn other_formats_and_other_keys_are_refused() {
    let scratch = Scratch::new("format");
    let path = scratch.0.join("store");
    drop(Store::open(&path, small()).unwrap());
    let with_key = |auth_key| Config {
        auth_key,
        ..small()
    };
    assert!(matches!(
        Store::open(&path, with_key(Some([1; 32]))),
        Err(OpenError::AuthKey { .. })
    ));
    let marker = fs::read_to_string(path.join("format")).unwrap();
    fs::write(path.join("format"), marker.replace("format 1", "format 2")).unwrap();
    let error = refusal(&path, small());
    assert!(
        error.contains("of format 2, this program reads format 1"),
        "{error}"
    );
    fs::write(path.join("format"), "").unwrap();
    let error = refusal(&path, small());
    assert!(error.contains("of format \"\", this program"), "{error}");
    let path = scratch.0.join("keyed");
    drop(Store::open(&path, with_key(Some([1; 32]))).unwrap());
    drop(Store::open(&path, with_key(Some([1; 32]))).unwrap());
    for other in [None, Some([2; 32])] {
        assert!(matches!(
            Store::open(&path, with_key(other)),
            Err(OpenError::AuthKey { .. })
        ));
    }
}

#[test]
fn a_folder_removed_while_it_is_open_costs_hits_only() {
    let scratch = Scratch::new("gone");
    let path = scratch.0.join("store");
    let store = Store::open(&path, small()).unwrap();
    let tokens = tokens(0, 1);
    let block = prefix(&tokens).block(0);
    put(&store, &block, 1000);
    flush(&store);
    fs::remove_dir_all(&path).unwrap();
    assert_eq!(get(&store, &block, 1000), Get::Failed);
    assert_eq!(get(&store, &block, 1000), Get::Miss);
    for number in 3..100 {
        let tokens = common::tokens(number, 3);
        put(&store, &prefix(&tokens).block(2), 1000);
        flush(&store);
    }
    assert!(store.stats().counters.write_errors > 0);
    assert_eq!(store.stats().counters.lost, 1);
}

#[test]
fn files_of_others_in_the_folder_are_not_touched() {
    let scratch = Scratch::new("files");
    let path = scratch.0.join("store");
    drop(Store::open(&path, small()).unwrap());
    fs::write(path.join("notes.txt"), "mine").unwrap();
    fs::write(path.join("1.data"), "mine").unwrap();
    let store = Store::open(&path, small()).unwrap();
    for number in 0..60 {
        let tokens = tokens(number, 4);
        (0..4).for_each(|block| _ = put(&store, &prefix(&tokens).block(block), 3000));
        flush(&store);
    }
    assert!(store.stats().counters.evicted > 0);
    drop(store);
    for name in ["notes.txt", "1.data"] {
        assert_eq!(fs::read_to_string(path.join(name)).unwrap(), "mine");
    }
}

#[test]
fn configurations_that_contradict_themselves_are_refused() {
    let scratch = Scratch::new("config");
    let configs = [
        Config {
            max_bytes: 10,
            ..small()
        },
        Config {
            segment_bytes: 10,
            ..small()
        },
        Config {
            max_entries: 0,
            ..small()
        },
        Config {
            queue_bytes: 0,
            ..small()
        },
    ];
    for config in configs {
        assert!(matches!(
            Store::open(scratch.0.join("store"), config),
            Err(OpenError::Config(_))
        ));
    }
    assert!(!scratch.0.join("store").exists());
    fs::create_dir(scratch.0.join("store")).unwrap();
    fs::set_permissions(scratch.0.join("store"), fs::Permissions::from_mode(0o700)).unwrap();
    let reader = Store::open(scratch.0.join("store"), reading());
    assert!(
        reader.is_ok_and(|reader| !reader.is_writer()),
        "an empty store is read as one"
    );
}

#[test]
fn a_payload_fills_buffers_of_any_lengths() {
    let scratch = Scratch::new("buffers");
    let store = Store::open(scratch.0.join("store"), Config::new(64 << 20)).unwrap();
    let tokens = tokens(0, 1);
    let prefix = prefix(&tokens);
    let payload: Vec<u8> = (0..500_000_u32).map(|at| (at % 251) as u8).collect();
    store.put(&prefix.block(0), &[&payload]);
    flush(&store);
    let read = 128 << 10; // bytes that are read at once
    for ends in [
        vec![],
        vec![0, 1, 1, 2, 499_999, 500_000],
        vec![read - 1, read, read, read + 1, 2 * read],
        (0..500_000).step_by(12_288).collect(),
    ] {
        let mut buffer = vec![0; payload.len()];
        let (mut rest, mut parts) = (&mut buffer[..], Vec::new());
        let mut start = 0;
        for end in ends {
            let (part, after) = rest.split_at_mut(end - start);
            parts.push(part);
            (rest, start) = (after, end);
        }
        parts.push(rest);
        assert_eq!(store.get(&prefix.block(0), &mut parts), Ok(Get::Hit));
        assert!(buffer == payload);
    }
}

#[test]
fn a_closed_store_reads_and_drops_what_is_put() {
    let scratch = Scratch::new("closed");
    let store = Store::open(scratch.0.join("store"), small()).unwrap();
    let tokens = tokens(0, 2);
    let prefix = prefix(&tokens);
    put(&store, &prefix.block(0), 1000);
    assert!(store.close(MINUTE));
    assert_eq!(get(&store, &prefix.block(0), 1000), Get::Hit);
    assert_eq!(
        put(&store, &prefix.block(1), 1000),
        Put::Dropped(DropReason::Closed)
    );
    assert_eq!(store.prune(Prune::All), 0);
    assert!(store.close(MINUTE));
    let again = Store::open(scratch.0.join("store"), small()).unwrap();
    assert_eq!(again.stats().counters.loaded, 1);
}
