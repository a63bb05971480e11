// The C++ extension megatron.data.helpers: loops that are too slow in Python.

#include "helpers.h"
#include "packing.h"

PYBIND11_MODULE(helpers, module) {
    module.doc() = "Index arrays of the GPT dataset and of blends, the samples they describe, packing, and BLOOM's BPE.";
    register_samples(module);
    register_blends(module);
    register_shuffler(module);
    register_byte_pairs(module);
    packing::register_packing(module);
    packing::register_steps(module);
    packing::register_buckets(module);
}
