//! `kv-store` beside redb, fjall and LMDB on what a cache of KV blocks needs of a disk.
//!
//! ```sh
//! cd rust/kv-bench/stores
//! cargo run --release --target-dir ../../../target/stores -- FOLDER [ROUNDS]
//! ```
//!
//! Every measurement runs in a separate process, and the stores take turns. An entry is a BLAKE3 checksum and a
//! payload; both are compared when it is read. `kv-store` does this itself. All files stay in the page cache.

mod peers;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use peers::{BATCH, Payloads, Peer, open};

/// Payload bytes of a store.
const TOTAL: usize = 256 << 20;
/// Of a block of 16 tokens of SmolLM2-135M in float32, and a quarter of it.
const LENGTHS: [usize; 2] = [368 << 10, 92 << 10];
const START_LEN: usize = 1 << 10;
const START_COUNT: usize = 100_000;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["part", store, part, len, folder] => {
            run(store, part, len.parse().expect("bytes"), Path::new(folder))
        }
        [folder] => compare(Path::new(folder), 3),
        [folder, rounds] => compare(Path::new(folder), rounds.parse().expect("rounds")),
        _ => panic!("FOLDER [ROUNDS]"),
    }
}

/// One measurement; prints a name and a number a line.
fn run(store: &str, part: &str, len: usize, folder: &Path) {
    let (count, mib) = (TOTAL / len, (TOTAL / len * len) as f64 / 1048576.0);
    let payloads = Payloads::new(len);
    let start = Instant::now();
    match part {
        "sync" | "flush" => {
            let mut peer = open(store, folder, TOTAL * 2, part == "sync");
            let start = Instant::now();
            write(&mut *peer, &payloads, 0..count);
            say("MiB/s", mib / start.elapsed().as_secs_f64());
            std::process::abort(); // as if it were killed: nothing is closed
        }
        "read" => {
            let mut peer = open(store, folder, TOTAL * 2, true);
            assert!(peer.get(&payloads, count - 1));
            say("ms to open", start.elapsed().as_secs_f64() * 1e3);
            (0..count).for_each(|number| assert!(peer.get(&payloads, number)));
            let start = Instant::now();
            let mut number = 1;
            for _ in 0..count {
                number = (number * 7919 + 12345) % count;
                assert!(peer.get(&payloads, number));
            }
            say("MiB/s", mib / start.elapsed().as_secs_f64());
            say("disk / payload", size(folder) as f64 / (count * len) as f64);
        }
        "churn" => {
            let mut peer = open(store, folder, TOTAL, false);
            write(&mut *peer, &payloads, 0..count);
            let start = Instant::now();
            for first in (count..3 * count).step_by(BATCH) {
                let end = (first + BATCH).min(3 * count);
                peer.write(&payloads, first..end, first - count..end - count);
            }
            say("MiB/s", 2.0 * mib / start.elapsed().as_secs_f64());
            peer.close();
            say("disk / payload", size(folder) as f64 / (count * len) as f64);
        }
        "fill" => {
            let mut peer = open(store, folder, TOTAL, false);
            write(&mut *peer, &payloads, 0..START_COUNT);
            peer.close();
        }
        "start" => {
            let mut peer = open(store, folder, TOTAL, false);
            assert!(peer.get(&payloads, START_COUNT / 2));
            say("ms to open", start.elapsed().as_secs_f64() * 1e3);
            peer.close();
        }
        _ => panic!("{part}"),
    }
}

fn write(peer: &mut dyn Peer, payloads: &Payloads, numbers: std::ops::Range<usize>) {
    for first in numbers.clone().step_by(BATCH) {
        peer.write(payloads, first..(first + BATCH).min(numbers.end), 0..0);
    }
}

fn say(name: &str, value: f64) {
    println!("{name}: {value}");
}

/// Bytes that the files of a folder take on the disk.
fn size(folder: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt as _;
    let files = std::fs::read_dir(folder).expect("a folder");
    files
        .map(|file| {
            let (path, about) = file
                .and_then(|file| Ok((file.path(), file.metadata()?)))
                .expect("a file");
            if about.is_dir() {
                size(&path)
            } else {
                about.blocks() * 512
            }
        })
        .sum()
}

/// All parts of all stores in turns; prints a table.
fn compare(folder: &Path, rounds: usize) {
    let mut figures: BTreeMap<(String, &str), Vec<f64>> = BTreeMap::new();
    for round in 0..rounds {
        for store in peers::NAMES {
            let mut part = |part: &str, len: usize, is_fresh: bool| {
                let path: PathBuf = folder.join(format!("{store}-{len}"));
                if is_fresh {
                    let _ = std::fs::remove_dir_all(&path);
                }
                let words = [
                    "part",
                    store,
                    part,
                    &len.to_string(),
                    path.to_str().expect("a name"),
                ];
                let done = Command::new(std::env::current_exe().expect("this program"))
                    .args(words)
                    .output();
                let done = done.expect("it runs");
                let said = String::from_utf8_lossy(&done.stdout);
                let aborts = matches!(part, "sync" | "flush");
                assert!(
                    done.status.success() || aborts,
                    "{}",
                    String::from_utf8_lossy(&done.stderr)
                );
                for line in said.lines() {
                    let (name, value) = line.split_once(": ").expect("a name and a value");
                    let key = (format!("{part} {} KiB, {name}", len >> 10), store);
                    figures
                        .entry(key)
                        .or_default()
                        .push(value.parse().expect("a number"));
                }
            };
            for len in LENGTHS {
                part("flush", len, true);
                part("sync", len, true);
                part("read", len, false);
                part("churn", len, true);
                let _ = std::fs::remove_dir_all(folder.join(format!("{store}-{len}")));
            }
            if round == 0 {
                part("fill", START_LEN, true);
            }
            part("start", START_LEN, false);
        }
    }
    println!("| median (worst) | {} |", peers::NAMES.join(" | "));
    println!("|---|{}", "---:|".repeat(peers::NAMES.len()));
    let mut names: Vec<&String> = figures.keys().map(|(name, _)| name).collect();
    names.dedup();
    for name in names {
        let cells = peers::NAMES.map(|store| {
            let mut values = figures[&(name.clone(), store)].clone();
            values.sort_by(f64::total_cmp);
            let worst = if name.ends_with("/s") {
                values[0]
            } else {
                values[values.len() - 1]
            };
            format!("{:.4} ({worst:.4})", values[values.len() / 2])
        });
        println!("| {name} | {} |", cells.join(" | "));
    }
}
