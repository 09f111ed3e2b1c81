//! The stores behind one trait.

use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use heed::types::Bytes;
use kv_store::{Config, Fingerprint, Get, Prefix, Put, Store};
use redb::ReadableDatabase as _;

pub const NAMES: [&str; 4] = ["kv-store", "redb", "fjall", "LMDB"];
/// Entries that are written, and made durable, at a time.
pub const BATCH: usize = 16;
const CACHE: usize = 64 << 20;
const MINUTE: Duration = Duration::from_secs(60);

/// A store under test.
pub trait Peer {
    /// Adds entries and removes others. When it returns, they survive the end of the process, or of the power.
    fn write(&mut self, payloads: &Payloads, added: Range<usize>, removed: Range<usize>);
    /// Reads an entry into memory, and compares its checksum. False if it is not there.
    fn get(&mut self, payloads: &Payloads, number: usize) -> bool;
    fn close(self: Box<Self>);
}

/// The entry of every number.
pub struct Payloads {
    bytes: Vec<u8>,
    len: usize,
}

impl Payloads {
    pub fn new(len: usize) -> Self {
        let mut bytes = vec![0; len + 8192];
        blake3::Hasher::new().finalize_xof().fill(&mut bytes);
        Self { bytes, len }
    }

    /// Incompressible, and another one for each of 8192 numbers.
    fn of(&self, number: usize) -> &[u8] {
        &self.bytes[number % 8192..][..self.len]
    }

    fn checked(&self, number: usize) -> Vec<u8> {
        let payload = self.of(number);
        let checksum = blake3::hash(payload);
        [&checksum.as_bytes()[..], payload].concat()
    }

    /// Copies an entry, as into a pool, and compares it.
    fn matches(&self, number: usize, value: &[u8]) -> bool {
        let copy = value.to_vec();
        let (checksum, payload) = copy.split_at(32);
        assert!(
            blake3::hash(payload).as_bytes() == checksum && payload[..64] == self.of(number)[..64]
        );
        true
    }
}

fn key(number: usize) -> [u8; 32] {
    *blake3::hash(&number.to_le_bytes()).as_bytes()
}

/// Opens a store for `max_bytes` of payload. With `syncs`, writes survive a power failure.
pub fn open(name: &str, folder: &Path, max_bytes: usize, syncs: bool) -> Box<dyn Peer> {
    if name != "kv-store" {
        std::fs::create_dir_all(folder).expect("a folder");
    }
    match name {
        "kv-store" => {
            let store = Store::open(folder, Config::new(max_bytes as u64)).expect("a store");
            Box::new(Ours {
                store,
                syncs,
                fingerprint: Fingerprint::of([("model", &b""[..])]),
            })
        }
        "redb" => {
            let mut builder = redb::Builder::new();
            let database = builder
                .set_cache_size(CACHE)
                .create(folder.join("redb"))
                .expect("a database");
            Box::new(Redb { database })
        }
        "fjall" => {
            let database = fjall::Database::builder(folder)
                .cache_size(CACHE as u64)
                .open()
                .expect("a database");
            let options = || {
                let blobs = fjall::KvSeparationOptions::default();
                fjall::KeyspaceCreateOptions::default().with_kv_separation(Some(blobs))
            };
            let keyspace = database.keyspace("entries", options).expect("a keyspace");
            Box::new(Fjall {
                database,
                keyspace,
                syncs,
            })
        }
        "LMDB" => {
            let mut options = heed::EnvOpenOptions::new();
            options.map_size(4 * max_bytes);
            if !syncs {
                // SAFETY: what this costs in a power failure is what is measured.
                unsafe { options.flags(heed::EnvFlags::NO_SYNC) };
            }
            // SAFETY: no other process has these files.
            let env = unsafe { options.open(folder) }.expect("an environment");
            let mut transaction = env.write_txn().expect("a transaction");
            let entries = env
                .create_database(&mut transaction, None)
                .expect("a database");
            transaction.commit().expect("a commit");
            Box::new(Lmdb { env, entries })
        }
        _ => panic!("{name}"),
    }
}

struct Ours {
    store: Store,
    syncs: bool,
    fingerprint: Fingerprint,
}

impl Ours {
    fn tokens(number: usize) -> [u32; 16] {
        std::array::from_fn(|at| (number * 16 + at) as u32)
    }
}

impl Peer for Ours {
    fn write(&mut self, payloads: &Payloads, added: Range<usize>, _: Range<usize>) {
        for number in added {
            let tokens = Self::tokens(number);
            let prefix = Prefix::new(self.fingerprint, b"", &tokens, 16);
            assert_eq!(
                self.store.put(&prefix.block(0), &[payloads.of(number)]),
                Put::Queued
            );
        }
        assert!(self.store.flush(MINUTE));
        if self.syncs {
            self.store.sync().expect("it syncs");
        }
    }

    fn get(&mut self, payloads: &Payloads, number: usize) -> bool {
        let tokens = Self::tokens(number);
        let prefix = Prefix::new(self.fingerprint, b"", &tokens, 16);
        let mut buffer = vec![0; payloads.len];
        let answer = self
            .store
            .get(&prefix.block(0), &mut [&mut buffer])
            .expect("this length");
        assert!(answer != Get::Hit || buffer[..64] == payloads.of(number)[..64]);
        answer == Get::Hit
    }

    fn close(self: Box<Self>) {
        assert!(self.store.close(MINUTE));
    }
}

const TABLE: redb::TableDefinition<'_, &[u8], &[u8]> = redb::TableDefinition::new("entries");

/// Without a sync a commit does not survive the end of the process either, so that it always has one.
struct Redb {
    database: redb::Database,
}

impl Peer for Redb {
    fn write(&mut self, payloads: &Payloads, added: Range<usize>, removed: Range<usize>) {
        let transaction = self.database.begin_write().expect("a transaction");
        let mut table = transaction.open_table(TABLE).expect("a table");
        for number in removed {
            table.remove(&key(number)[..]).expect("it removes");
        }
        for number in added {
            table
                .insert(&key(number)[..], &payloads.checked(number)[..])
                .expect("it inserts");
        }
        drop(table);
        transaction.commit().expect("a commit");
    }

    fn get(&mut self, payloads: &Payloads, number: usize) -> bool {
        let transaction = self.database.begin_read().expect("a transaction");
        let table = transaction.open_table(TABLE).expect("a table");
        let value = table.get(&key(number)[..]).expect("it reads");
        value.is_some_and(|value| payloads.matches(number, value.value()))
    }

    fn close(self: Box<Self>) {}
}

struct Fjall {
    database: fjall::Database,
    keyspace: fjall::Keyspace,
    syncs: bool,
}

impl Peer for Fjall {
    fn write(&mut self, payloads: &Payloads, added: Range<usize>, removed: Range<usize>) {
        let mode = if self.syncs {
            fjall::PersistMode::SyncAll
        } else {
            fjall::PersistMode::Buffer
        };
        let mut batch = self.database.batch().durability(Some(mode));
        for number in removed {
            batch.remove(&self.keyspace, key(number));
        }
        for number in added {
            batch.insert(&self.keyspace, key(number), payloads.checked(number));
        }
        batch.commit().expect("a commit");
    }

    fn get(&mut self, payloads: &Payloads, number: usize) -> bool {
        let value = self.keyspace.get(key(number)).expect("it reads");
        value.is_some_and(|value| payloads.matches(number, &value))
    }

    fn close(self: Box<Self>) {}
}

struct Lmdb {
    env: heed::Env,
    entries: heed::Database<Bytes, Bytes>,
}

impl Peer for Lmdb {
    fn write(&mut self, payloads: &Payloads, added: Range<usize>, removed: Range<usize>) {
        let mut transaction = self.env.write_txn().expect("a transaction");
        for number in removed {
            self.entries
                .delete(&mut transaction, &key(number))
                .expect("it removes");
        }
        for number in added {
            self.entries
                .put(&mut transaction, &key(number), &payloads.checked(number))
                .expect("it inserts");
        }
        transaction.commit().expect("a commit");
    }

    fn get(&mut self, payloads: &Payloads, number: usize) -> bool {
        let transaction = self.env.read_txn().expect("a transaction");
        let value = self
            .entries
            .get(&transaction, &key(number))
            .expect("it reads");
        value.is_some_and(|value| payloads.matches(number, value))
    }

    fn close(self: Box<Self>) {}
}
