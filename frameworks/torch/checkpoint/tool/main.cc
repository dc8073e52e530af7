// sirtaki-checkpoint looks into checkpoints, and makes one file of several. See docs/checkpoints.md.
#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <c10/util/StringUtil.h>

#include <array>
#include <charconv>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <functional>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/base/text.h"
#include "frameworks/torch/checkpoint/checkpoint_file.h"
#include "frameworks/torch/checkpoint/checkpoint_reading.h"
#include "frameworks/torch/checkpoint/tool/python_file.h"
#include "frameworks/torch/checkpoint/tool/saved_optimizer.h"
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
  std::vector<std::string> lines;
  bool in_shards = false;
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
      InputArchive one;
      index.optimizers.push_back({name, key, lines.at(name).vec(), !all.try_read(key, one)});
    }
  });
  return index;
}

// The optimizers whose state is in shards, by key.
using InShards = std::map<std::string, SavedOptimizer>;
InShards OptimizersInShards(const Index& index) {
  InShards in_shards;
  for (const OptimizerOfFile& one : index.optimizers) {
    if (one.in_shards) in_shards.emplace(one.key, SavedOptimizer(one.lines));
  }
  return in_shards;
}

// What a file has of each optimizer.
using PiecesOfFile = std::vector<std::pair<const OptimizerOfFile*, std::vector<Piece>>>;

// Adds what a file of shards has, and returns it. `keep`: as SavedOptimizer::Add has it.
PiecesOfFile AddShards(const std::string& path, const std::string& name, const Index& index,
                       bool keep, InShards* in_shards) {
  InputArchive archive;
  ReadShardFile(path, name, &archive);
  PiecesOfFile pieces;
  About(Beside(path, name), [&] {
    InputArchive all = ReadNested(archive, "optimizers", "optimizers");
    for (const OptimizerOfFile& one : index.optimizers) {
      InputArchive own;
      if (!one.in_shards || !all.try_read(one.key, own)) continue;
      pieces.emplace_back(&one, in_shards->at(one.key).Add(own, keep));
    }
  });
  return pieces;
}

void FinishAll(const std::string& path, const Index& index, const InShards& in_shards) {
  for (const OptimizerOfFile& one : index.optimizers) {
    if (!one.in_shards) continue;
    About(path + ": optimizer " + Quoted(one.name), [&] { in_shards.at(one.key).Finish(); });
  }
}

// ---- list ----

std::string BytesText(std::uint64_t bytes) { return std::to_string(bytes) + " bytes"; }
std::string SizeText(const std::string& path) {
  return BytesText(std::filesystem::file_size(path));
}

std::string ValueText(const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return TypeAndShape(tensor) + (tensor.defined() ? ", " + BytesText(tensor.nbytes()) : "");
  }
  if (value.isString()) return Quoted(value.toStringRef());
  if (value.isModule()) return "an archive";
  if (value.isDouble()) {
    std::array<char, 32> digits{};  // as many as tell it from all others
    return {digits.data(), std::to_chars(digits.begin(), digits.end(), value.toDouble()).ptr};
  }
  if (value.isTuple()) {
    std::vector<std::string> parts;
    for (const c10::IValue& part : value.toTupleRef().elements()) parts.push_back(ValueText(part));
    return "(" + c10::Join(", ", parts) + ")";
  }
  std::ostringstream text;
  text << value;
  return core::Escaped(text.str());
}

template <class Named>
std::string NamedText(const Named& items) {
  std::string text;
  for (const auto& [name, value] : items) {
    text += (text.empty() ? "" : "; ") + core::Escaped(name) + " = " + ValueText(value);
  }
  return text.empty() ? "nothing" : text;
}

// Calls with the name and the value of each item of a dict of the archive.
void ForEachIn(const c10::IValue& dict,
               const std::function<void(const std::string&, const c10::IValue&)>& call) {
  for (const auto& item : dict.toGenericDict()) call(item.key().toStringRef(), item.value());
}

void PrintPieces(const OptimizerOfFile& optimizer, const SavedOptimizer& saved,
                 const std::vector<Piece>& pieces) {
  for (const Piece& piece : pieces) {
    const SavedOptimizer::Parameter& parameter = saved.parameters()[piece.place];
    std::string text = "  optimizer " + Quoted(optimizer.name) + ", " + parameter.text;
    if (piece.count != parameter.numel) {
      text += ", elements " + std::to_string(piece.begin) + " to " +
              std::to_string(piece.begin + piece.count - 1);
    }
    const bool is_again = piece.first_place != piece.place;
    Print(text + ": " + (is_again ? "stands above" : NamedText(piece.state)));
  }
}

void PrintGroups(const OptimizerOfFile& optimizer, const SavedOptimizer& saved) {
  for (std::size_t g = 0; g < saved.groups().size(); ++g) {
    Print("  optimizer " + Quoted(optimizer.name) + ", group " + std::to_string(g) + ": " +
          NamedText(saved.groups()[g].options));
  }
}

void ListOptimizer(const OptimizerOfFile& optimizer, Index& index) {
  SavedOptimizer saved(optimizer.lines);
  std::string text = "optimizer " + Quoted(optimizer.name);
  for (const auto& group : saved.groups())
    text += (&group == &saved.groups()[0] ? ", " : " and ") + group.kind;
  if (optimizer.in_shards) return Print(text + ", in shards");
  Print(text);
  InputArchive all = ReadNested(index.archive, "optimizers", "optimizers");
  InputArchive one = ReadNested(all, optimizer.key, "optimizer");
  try {
    const std::vector<Piece> pieces = saved.Add(one, /*keep=*/false);
    PrintGroups(optimizer, saved);
    PrintPieces(optimizer, saved, pieces);
  } catch (const std::exception& error) {
    Print("  saved in a way of its own: " + TextOf(error));
  }
}

void ListIndex(const std::string& path, Index& index) {
  InputArchive& archive = index.archive;
  Print(path + ": format " + std::to_string(ReadFormat(archive)) + ", of " +
        std::to_string(Read<std::int64_t>(archive, "ranks")) + " ranks, " + SizeText(path));
  for (const char* kind : {"parameter", "buffer"}) {
    const std::string key = std::string("model_") + kind + "s";
    ForEachIn(Read<c10::IValue>(archive, key), [&](const auto& model, const auto& tensors) {
      ForEachIn(tensors, [&](const auto& name, const auto& tensor) {
        Print("model " + Quoted(model) + ": " + kind + " " + Quoted(name) + " " +
              ValueText(tensor));
      });
    });
  }
  for (const OptimizerOfFile& optimizer : index.optimizers) ListOptimizer(optimizer, index);
  for (const auto& [key, kind] : std::map<std::string, std::string>{{"schedulers", "scheduler"},
                                                                    {"integers", "value"},
                                                                    {"numbers", "value"},
                                                                    {"texts", "value"},
                                                                    {"tensors", "value"},
                                                                    {"generators", "generator"}}) {
    ForEachIn(Read<c10::IValue>(archive, key),
              [&, kind = kind](const auto& name, const auto& value) {
                Print(kind + " " + Quoted(name) + ": " + ValueText(value));
              });
  }
  InputArchive objects = ReadNested(archive, "objects", "objects");
  const auto names = Read<std::vector<std::string>>(archive, "object_names");
  for (std::size_t i = 0; i < names.size(); ++i) {
    InputArchive object = ReadNested(objects, std::to_string(i), "object");
    Print("object " + Quoted(names[i]) + ": " + NamedText(ItemsOf(object)));
  }
}

void List(const std::string& path) {
  Index index = ReadIndex(path);
  About(path, [&] { ListIndex(path, index); });
  InShards in_shards = OptimizersInShards(index);
  for (const std::string& name : index.shards) {
    const PiecesOfFile of_file = AddShards(path, name, index, /*keep=*/false, &in_shards);
    Print(Beside(path, name) + ": " + SizeText(Beside(path, name)));
    for (const auto& [optimizer, pieces] : of_file) {
      const SavedOptimizer& saved = in_shards.at(optimizer->key);
      if (name == index.shards.front()) PrintGroups(*optimizer, saved);
      PrintPieces(*optimizer, saved, pieces);
    }
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
  InShards in_shards = OptimizersInShards(index);
  for (const std::string& name : index.shards) {
    check([&] { AddShards(path, name, index, /*keep=*/false, &in_shards); }, Beside(path, name));
  }
  if (code == kGood) check([&] { FinishAll(path, index, in_shards); }, "");
  return code;
}

// ---- consolidate ----

void WritePlain(const std::string& out, Index& index, const InShards& in_shards) {
  OutputArchive archive;
  for (const auto& [key, value] : ItemsOf(index.archive)) {
    if (key != "format" && key != "shards" && key != "optimizers") archive.write(key, value);
  }
  archive.write("format", c10::IValue(kFormat));
  OutputArchive optimizers(archive.compilation_unit());
  InputArchive saved = ReadNested(index.archive, "optimizers", "optimizers");
  for (const auto& [key, value] : ItemsOf(saved)) optimizers.write(key, value);
  for (const auto& [key, optimizer] : in_shards) {
    OutputArchive one(archive.compilation_unit());
    optimizer.Write(one);
    optimizers.write(key, one);
  }
  archive.write("optimizers", optimizers);
  NewCheckpointFile(out, archive).Replace();
}

void AddOptimizersTo(PythonFile* file, Index& index, InShards in_shards) {
  InputArchive all = ReadNested(index.archive, "optimizers", "optimizers");
  for (const OptimizerOfFile& one : index.optimizers) {
    SavedOptimizer& saved = in_shards.try_emplace(one.key, one.lines).first->second;
    try {
      if (saved.Kind().empty()) {
        throw std::runtime_error(
            "it is none of SGD, Adam, AdamW, RMSprop and Adagrad, whose state Python's torch.optim "
            "has as well");
      }
      if (!one.in_shards) {
        InputArchive own = ReadNested(all, one.key, "optimizer");
        saved.Add(own);
      }
    } catch (const std::exception& error) {
      Complain("optimizer " + Quoted(one.name) + " is left out: " + TextOf(error));
      continue;
    }
    file->Add("optimizer", one.name, PythonStateOf(saved));
  }
}

void WritePython(const std::string& out, Index& index, const InShards& in_shards) {
  PythonFile file;
  using Tensors = c10::Dict<std::string, at::Tensor>;
  const auto buffers = Read<c10::Dict<std::string, Tensors>>(index.archive, "model_buffers");
  for (const auto& model :
       Read<c10::Dict<std::string, Tensors>>(index.archive, "model_parameters")) {
    const Tensors state = model.value().copy();
    for (const auto& buffer : buffers.at(model.key())) state.insert(buffer.key(), buffer.value());
    file.Add("model", model.key(), state);
  }
  AddOptimizersTo(&file, index, in_shards);
  for (const char* key : {"integers", "numbers", "texts", "tensors"}) {
    ForEachIn(Read<c10::IValue>(index.archive, key),
              [&](const auto& name, const auto& value) { file.Add("value", name, value); });
  }
  file.Add("random", "generators", Read<c10::IValue>(index.archive, "generators"));
  ForEachIn(Read<c10::IValue>(index.archive, "schedulers"),
            [](const auto& name, const auto& value) {
              Complain("scheduler " + Quoted(name) +
                       " is left out, since Python's remember other things: " + ValueText(value));
            });
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
  InShards in_shards = OptimizersInShards(index);
  for (const auto& name : index.shards) AddShards(path, name, index, /*keep=*/true, &in_shards);
  FinishAll(path, index, in_shards);
  About(out, [&] { (python ? WritePython : WritePlain)(out, index, in_shards); });
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
