#include "frameworks/torch/checkpoint/tool/python_file.h"

#include <ATen/core/Dict.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/pickler.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "frameworks/torch/checkpoint/checkpoint_file.h"
#include "frameworks/torch/tensors/tensor_bridge.h"

namespace sirtaki::detail {

c10::impl::GenericDict AnyDict() {
  return c10::impl::GenericDict(c10::AnyType::get(), c10::AnyType::get());
}

void PythonFile::Add(const std::string& kind, const std::string& name, const c10::IValue& value) {
  parts_.push_back({kind, name, value});
}

void PythonFile::Write(const std::string& path) const {
  c10::impl::GenericDict all = AnyDict();
  for (const Part& part : parts_) {
    const bool is_alone = std::count_if(parts_.begin(), parts_.end(), [&](const Part& other) {
                            return other.name == part.name;
                          }) == 1;
    all.insert(is_alone ? part.name : part.kind + " " + part.name, part.value);
  }
  const auto write = [&all](const NewCheckpointFile::Sink& sink) {
    std::string pickled;
    torch::jit::Pickler pickler(
        [&pickled](const char* bytes, std::size_t count) { pickled.append(bytes, count); }, nullptr,
        nullptr, nullptr, nullptr, /*tag_aggregates=*/false);
    pickler.protocol();
    pickler.pushIValue(all);
    pickler.stop();
    caffe2::serialize::PyTorchStreamWriter writer(sink);
    writer.writeRecord("data.pkl", pickled.data(), pickled.size());
    writer.writeRecord("byteorder", "little", 6);
    for (std::size_t i = 0; i < pickler.tensorData().size(); ++i) {
      const at::Tensor& tensor = pickler.tensorData()[i];
      const at::ScalarType type = tensor.scalar_type();
      if ((type > at::kBool || type == at::kComplexHalf) && type != at::kBFloat16) {
        throw std::runtime_error(
            "a tensor that is " + TypeAndShape(tensor) +
            " cannot be in a file for Python: LibTorch cannot pickle its type");
      }
      const at::Storage& storage = tensor.storage();
      writer.writeRecord("data/" + std::to_string(i), storage.data(), storage.nbytes());
    }
    writer.writeEndOfFile();
  };
  NewCheckpointFile(path, write).Replace();
}

}  // namespace sirtaki::detail
