//! `--trace FILE`: what was asked and answered, one JSON object a line. Headers, and with them keys, are never in it.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;

use serde_json::{Value, json};

use crate::ServerError;

/// Records that wait for the disk; more are dropped and counted.
const WAITING_MAX: usize = 1024;

pub struct Trace {
    records: SyncSender<Value>,
}

impl Trace {
    /// Appends to `path`, on a thread of its own.
    pub fn open(path: &Path) -> Result<Self, ServerError> {
        let bad = |source| ServerError::Trace { path: path.to_path_buf(), source };
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(bad)?;
        let (records, inbox) = sync_channel::<Value>(WAITING_MAX);
        let write = move || {
            let mut file = BufWriter::new(file);
            while let Ok(record) = inbox.recv() {
                if let Err(e) = write_all(&mut file, record, &inbox) {
                    tracing::error!(error = %e, "the trace cannot be written: it ends here");
                    return;
                }
            }
        };
        thread::Builder::new().name("trace".into()).spawn(write).map_err(bad)?;
        Ok(Trace { records })
    }

    /// `false`: the disk is too slow, the record is lost.
    pub fn write(&self, what: &str, record: Value) -> bool {
        let mut line = json!({"at": crate::now(), "what": what});
        if let (Value::Object(line), Value::Object(record)) = (&mut line, record) {
            line.extend(record);
        }
        self.records.try_send(line).is_ok()
    }
}

/// This record and all that wait behind it.
fn write_all(
    file: &mut BufWriter<File>,
    first: Value,
    more: &std::sync::mpsc::Receiver<Value>,
) -> std::io::Result<()> {
    writeln!(file, "{first}")?;
    for record in more.try_iter() {
        writeln!(file, "{record}")?;
    }
    file.flush()
}
