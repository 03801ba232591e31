"""Writes the file that ships with the program: the routed experts in Q2_K, every other matrix in Q8_0.

    python ship.py nano-f16.gguf ../../models/nano.gguf

Q2_K here is a search over a few scales per group of 16 for the least squared error; `gguf` has no quantiser for it.
"""
import sys

import gguf
import numpy as np

Q = gguf.GGMLQuantizationType


def q2_k(x):
    """Rows of f32 -> Q2_K blocks (layout: ggml's block_q2_K)."""
    g = x.reshape(-1, 16, 16).astype(np.float32)
    low, high = np.minimum(g.min(-1), 0), g.max(-1)
    best_err, best_scale, best_min = None, None, None
    for shrink in np.linspace(0.7, 1.05, 15):
        scale = np.maximum((high - low) * shrink / 3, 1e-12)
        for lift in (0.8, 0.9, 1.0):
            minimum = -low * lift
            q = np.clip(np.rint((g + minimum[..., None]) / scale[..., None]), 0, 3)
            err = ((q * scale[..., None] - minimum[..., None] - g) ** 2).sum(-1)
            if best_err is None:
                best_err, best_scale, best_min = err, scale, minimum
            else:
                better = err < best_err
                best_err = np.where(better, err, best_err)
                best_scale, best_min = np.where(better, scale, best_scale), np.where(better, minimum, best_min)
    d = (best_scale.max(-1) / 15).astype(np.float16)
    dmin = (best_min.max(-1) / 15).astype(np.float16)
    df, mf = d.astype(np.float32)[:, None], dmin.astype(np.float32)[:, None]
    sc = np.clip(np.rint(best_scale / np.maximum(df, 1e-12)), 0, 15)
    mn = np.clip(np.rint(best_min / np.maximum(mf, 1e-12)), 0, 15)
    scale, minimum = (df * sc)[..., None], (mf * mn)[..., None]
    q = np.clip(np.rint((g + minimum) / np.maximum(scale, 1e-12)), 0, 3).astype(np.uint8).reshape(-1, 2, 4, 32)
    qs = q[:, :, 0] | q[:, :, 1] << 2 | q[:, :, 2] << 4 | q[:, :, 3] << 6
    scales = (sc.astype(np.uint8) | mn.astype(np.uint8) << 4)
    halves = np.stack([d, dmin], -1).view(np.uint8).reshape(-1, 4)
    return np.concatenate([scales, qs.reshape(-1, 64), halves], 1)


def main():
    source, target = sys.argv[1:]
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "deepseek4")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture",):
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub)
    for t in reader.tensors:
        x, shape = t.data, [int(n) for n in reversed(t.shape)]
        if "_exps" in t.name:
            blocks = q2_k(np.array(x, np.float32).reshape(-1, shape[-1]))
            raw = blocks.reshape(*shape[:-1], shape[-1] // 256 * 84)
            writer.add_tensor(t.name, raw, raw_dtype=Q.Q2_K)
        elif t.tensor_type == Q.F16 and len(shape) == 2 and "ape" not in t.name and "hc_" not in t.name:
            raw = gguf.quants.quantize(np.array(x, np.float32).reshape(shape), Q.Q8_0)
            writer.add_tensor(t.name, raw, raw_dtype=Q.Q8_0)
        else:
            writer.add_tensor(t.name, np.array(x), raw_dtype=t.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
