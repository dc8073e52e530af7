// sirtaki-checkpoint looks into checkpoints, and makes one file of several. See docs/checkpoints.md.
#include <ATen/core/Dict.h>
#include <ATen/core/List.h>

#include <array>
#include <charconv>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "core/base/text.h"
#include "frameworks/torch/checkpoint/checkpoint_file.h"
#include "frameworks/torch/checkpoint/checkpoint_reading.h"
#include "frameworks/torch/checkpoint/tool/python_file.h"
#include "frameworks/torch/checkpoint/tool/saved_optimizer.h"
#include "frameworks/torch/state/sharded_state.h"
#include "frameworks/torch/tensors/tensor_bridge.h"

namespace sirtaki::detail {
namespace {

using core::Quoted;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

constexpr int kGood = 0;
constexpr int kBad = 1;
constexpr int kWrongUse = 2;

constexpr const char* kHelp =
    R"(sirtaki-checkpoint looks into a checkpoint of sirtaki::save_checkpoint, and makes one file of several.

usage: sirtaki-checkpoint list PATH
       sirtaki-checkpoint verify PATH
       sirtaki-checkpoint consolidate PATH OUT [--python] [--force]

list         prints the parts of the checkpoint with types, shapes and bytes, and what each file of
             shards has
verify       reads every file and prints a line for each: whether its checksum is right, and whether
             it is of this save; the shards together must be all of the optimizers' state, once
consolidate  writes OUT, one file without shards that load_checkpoint and LibTorch read
  --python   OUT is for Python's torch.load instead: a dict of state dicts
  --force    OUT is replaced if it is there

PATH is the path that save_checkpoint was given; the files of shards are found beside it.
Exit code: 0 if all is well, 1 if something is missing or damaged or cannot be written, 2 for wrong use.
)";

void Print(const std::string& line) { std::printf("%s\n", line.c_str()); }
void Complain(const std::string& text) {
  std::fprintf(stderr, "sirtaki-checkpoint: %s\n", text.c_str());
}

struct OptimizerOfFile {
  std::string name;
  std::string key;  // in "optimizers"
  bool in_shards = false;
  ShardCover cover;
  SavedOptimizer saved;
};

// The file at the path of the checkpoint.
struct Index {
  InputArchive archive;
  std::vector<std::string> shards;  // names of files
  std::vector<OptimizerOfFile> optimizers;
};

// Calls, and puts the path before the text of what that throws.
void About(const std::string& path, const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    const std::string text = TextOf(error);
    throw std::runtime_error(text.starts_with(path) ? text : path + ": " + text);
  }
}

Index ReadIndex(const std::string& path) {
  Index index;
  About(path, [&] {
    if (!ReadCheckpointFile(path, &index.archive)) throw std::runtime_error("is missing");
    ReadFormat(index.archive);
    index.shards = NamesOfShards(index.archive);
    InputArchive all = ReadNested(index.archive, "optimizers", "optimizers");
    using Lines = c10::Dict<std::string, c10::List<std::string>>;
    const auto lines = Read<Lines>(index.archive, "optimizer_parameters");
    for (const auto& name : Read<std::vector<std::string>>(index.archive, "optimizer_names")) {
      const std::string key = std::to_string(index.optimizers.size());
      const std::vector<std::string> of_this = lines.at(name).vec();
      InputArchive one;
      index.optimizers.push_back(
          {name, key, !all.try_read(key, one), ShardCover(of_this), SavedOptimizer(of_this)});
    }
  });
  return index;
}

// Reads a file of shards, and calls with what it has of each optimizer.
void ReadShards(const std::string& path, const std::string& name, Index& index,
                const std::function<void(OptimizerOfFile&, InputArchive&)>& call) {
  InputArchive archive;
  ReadShardFile(path, name, &archive);
  About(Beside(path, name), [&] {
    InputArchive all = ReadNested(archive, "optimizers", "optimizers");
    for (OptimizerOfFile& one : index.optimizers) {
      InputArchive own;
      if (one.in_shards && all.try_read(one.key, own)) call(one, own);
    }
  });
}

std::string SizeText(const std::string& path) {
  std::error_code missing;
  const auto size = std::filesystem::file_size(path, missing);
  return missing ? "no file" : std::to_string(size) + " bytes";
}

// ---- list ----

std::string ValueText(const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return TypeAndShape(tensor) +
           (tensor.defined() ? ", " + std::to_string(tensor.nbytes()) + " bytes" : "");
  }
  if (value.isString()) return Quoted(value.toStringRef());
  if (value.isDouble()) {
    std::array<char, 32> digits{};  // as many as tell it from all others
    return {digits.data(), std::to_chars(digits.begin(), digits.end(), value.toDouble()).ptr};
  }
  std::ostringstream text;
  text << value;
  return core::Escaped(text.str());
}

// Prints what stands in a dict, or is a value by itself, a line each.
void ListValue(const std::string& name, const c10::IValue& value) {
  if (!value.isGenericDict()) return Print(name + ": " + ValueText(value));
  for (const auto& item : value.toGenericDict()) {
    ListValue(name + " " + Quoted(item.key().toStringRef()), item.value());
  }
}

void ListArchive(const std::string& name, InputArchive& archive) {
  for (const auto& [key, value] : ItemsOf(archive)) {
    const std::string of_key = name + core::Escaped(key);
    if (!value.isModule()) {
      ListValue(of_key, value);
      continue;
    }
    InputArchive nested = ReadNested(archive, key, key);
    ListArchive(of_key + "/", nested);
  }
}

void List(const std::string& path) {
  Index index = ReadIndex(path);
  Print(path + ": " + SizeText(path));
  ListArchive("  ", index.archive);
  for (const std::string& name : index.shards) {
    const std::string file = Beside(path, name);
    Print(file + ": " + SizeText(file));
    ReadShards(path, name, index, [](OptimizerOfFile& one, InputArchive& own) {
      const auto ranges = one.cover.RangesOf(own);
      one.cover.Add(ranges);
      for (std::size_t place = 0; place < ranges.size(); ++place) {
        if (ranges[place].count == 0) continue;
        Print("  optimizer " + Quoted(one.name) + ", " + one.cover.line(place) + ": elements " +
              std::to_string(ranges[place].begin) + " to " +
              std::to_string(ranges[place].begin + ranges[place].count - 1));
      }
      InputArchive saved = ReadNested(own, "optimizer", "optimizer");
      ListArchive("  optimizer " + Quoted(one.name) + ": ", saved);
    });
  }
}

// ---- verify ----

int Verify(const std::string& path) {
  int code = kGood;
  const auto check = [&code](const std::function<void()>& call, const std::string& file) {
    try {
      call();
      if (!file.empty()) Print(file + ": good, " + SizeText(file));
    } catch (const std::exception& error) {
      Print(TextOf(error));
      code = kBad;
    }
  };
  Index index;
  check([&] { index = ReadIndex(path); }, path);
  for (const std::string& name : index.shards) {
    const auto add = [](OptimizerOfFile& one, InputArchive& own) {
      one.cover.Add(one.cover.RangesOf(own));
    };
    check([&] { ReadShards(path, name, index, add); }, Beside(path, name));
  }
  for (const OptimizerOfFile& one : index.optimizers) {
    if (code != kGood || !one.in_shards) continue;
    check([&] { About(path + ": optimizer " + Quoted(one.name), [&] { one.cover.Finish(); }); },
          "");
  }
  return code;
}

// ---- consolidate ----

void WritePlain(const std::string& out, Index& index) {
  OutputArchive archive;
  for (const auto& [key, value] : ItemsOf(index.archive)) {
    if (key == "shards" || key == "optimizers") continue;
    archive.write(key, key == "format" ? c10::IValue(kFormat) : value);
  }
  OutputArchive optimizers(archive.compilation_unit());
  InputArchive saved = ReadNested(index.archive, "optimizers", "optimizers");
  for (const auto& [key, value] : ItemsOf(saved)) optimizers.write(key, value);
  for (OptimizerOfFile& optimizer : index.optimizers) {
    if (!optimizer.in_shards) continue;
    OutputArchive one(archive.compilation_unit());
    optimizer.saved.Write(one);
    optimizers.write(optimizer.key, one);
  }
  archive.write("optimizers", optimizers);
  NewCheckpointFile(out, archive).Replace();
}

void AddOptimizersTo(PythonFile* file, Index& index) {
  InputArchive all = ReadNested(index.archive, "optimizers", "optimizers");
  for (OptimizerOfFile& one : index.optimizers) {
    try {
      if (!one.in_shards) {
        InputArchive own = ReadNested(all, one.key, "optimizer");
        one.saved.Load(own);
      }
      file->Add("optimizer", one.name, one.saved.StateDict());
    } catch (const std::exception& error) {
      Complain("optimizer " + Quoted(one.name) + " is left out: " + TextOf(error));
    }
  }
}

void WritePython(const std::string& out, Index& index) {
  PythonFile file;
  using Tensors = c10::Dict<std::string, at::Tensor>;
  const auto buffers = Read<c10::Dict<std::string, Tensors>>(index.archive, "model_buffers");
  for (const auto& model :
       Read<c10::Dict<std::string, Tensors>>(index.archive, "model_parameters")) {
    const Tensors state = model.value().copy();
    for (const auto& buffer : buffers.at(model.key())) state.insert(buffer.key(), buffer.value());
    file.Add("model", model.key(), state);
  }
  AddOptimizersTo(&file, index);
  for (const char* key : {"integers", "numbers", "texts", "tensors"}) {
    for (const auto& item : Read<c10::IValue>(index.archive, key).toGenericDict()) {
      file.Add("value", item.key().toStringRef(), item.value());
    }
  }
  file.Add("random", "generators", Read<c10::IValue>(index.archive, "generators"));
  for (const auto& item : Read<c10::IValue>(index.archive, "schedulers").toGenericDict()) {
    Complain("scheduler " + Quoted(item.key().toStringRef()) +
             " is left out, since Python's remember other things: " + ValueText(item.value()));
  }
  for (const auto& name : Read<std::vector<std::string>>(index.archive, "object_names")) {
    Complain("object " + Quoted(name) + " is left out: only its own load() can read it");
  }
  file.Write(out);
}

void Consolidate(const std::string& path, const std::string& out, bool python, bool force) {
  if (!force && std::filesystem::exists(out)) {
    throw std::runtime_error(out + " is there already: --force replaces it");
  }
  Index index = ReadIndex(path);
  for (const std::string& name : index.shards) {
    ReadShards(path, name, index,
               [](OptimizerOfFile& one, InputArchive& own) { one.saved.Add(own); });
  }
  for (OptimizerOfFile& one : index.optimizers) {
    if (!one.in_shards) continue;
    About(path + ": optimizer " + Quoted(one.name), [&] { one.saved.Finish(); });
  }
  About(out, [&] { (python ? WritePython : WritePlain)(out, index); });
  Print(out + ": " + SizeText(out));
}

// ---- the command line ----

int Main(const std::vector<std::string>& args) {
  std::vector<std::string> words;
  bool python = false;
  bool force = false;
  for (const std::string& arg : args) {
    if (arg == "--help" || arg == "-h") return std::fputs(kHelp, stdout) < 0 ? kBad : kGood;
    if (arg == "--python") {
      python = true;
    } else if (arg == "--force") {
      force = true;
    } else if (arg.starts_with("-")) {
      Complain("there is no flag " + Quoted(arg) + ": see --help");
      return kWrongUse;
    } else {
      words.push_back(arg);
    }
  }
  const std::string command = words.empty() ? "" : words[0];
  const bool consolidate = command == "consolidate";
  if (command != "list" && command != "verify" && !consolidate) {
    Complain((command.empty() ? "a command is missing" : "there is no command " + Quoted(command)) +
             ": list, verify or consolidate; see --help");
    return kWrongUse;
  }
  if (words.size() != (consolidate ? 3 : 2) || (!consolidate && (python || force))) {
    Complain(consolidate ? "consolidate takes PATH and OUT: see --help"
                         : command + " takes PATH alone: see --help");
    return kWrongUse;
  }
  try {
    if (command == "verify") return Verify(words[1]);
    if (consolidate) {
      Consolidate(words[1], words[2], python, force);
    } else {
      List(words[1]);
    }
    return kGood;
  } catch (const std::exception& error) {
    Complain(TextOf(error));
    return kBad;
  }
}

}  // namespace
}  // namespace sirtaki::detail

int main(int argc, char** argv) { return sirtaki::detail::Main({argv + 1, argv + argc}); }
