// The C++ extension megatron.data.helpers: loops that are too slow in Python.

// one translation unit: each more takes five seconds for the headers of pybind11
#include "blends.cpp"
#include "buckets.cpp"
#include "byte_pairs.cpp"
#include "packing.cpp"
#include "samples.cpp"
#include "shuffle.cpp"
#include "steps.cpp"

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
