# FindLibTorch: LibTorch without its own TorchConfig, which in CUDA builds demands a CUDA toolkit and is slow.
#
# Looks, in this order, at
#   LibTorch_ROOT, LIBTORCH (variable or environment)   the folder that holds include/ and lib/
#   Torch_DIR (variable or environment)                 .../share/cmake/Torch
#   CMAKE_PREFIX_PATH (variable or environment)         an unpacked libtorch, site-packages/torch, or
#                                                       torch.utils.cmake_prefix_path
#   LibTorch_FALLBACKS                                  further folders, set by the caller
#   .venv of the source tree
#
# Gives LibTorch::LibTorch (torch_cpu and c10), LibTorch::CUDA in builds with CUDA (for programs that put tensors on GPUs,
# but start only where its libraries are), and
#   LibTorch_FOUND, LibTorch_VERSION, LibTorch_BUILD (e.g. "2.11.0+cu130"), LibTorch_ROOT_DIR, LibTorch_WHY_NOT

set(_libtorch_candidates "")
foreach(_libtorch_name IN ITEMS LibTorch_ROOT LIBTORCH)
  list(APPEND _libtorch_candidates ${${_libtorch_name}} $ENV{${_libtorch_name}})
endforeach()
foreach(_libtorch_dir IN ITEMS ${Torch_DIR} $ENV{Torch_DIR})
  list(APPEND _libtorch_candidates "${_libtorch_dir}/../../..")
endforeach()
string(REPLACE ":" ";" _libtorch_env_prefix "$ENV{CMAKE_PREFIX_PATH}")
foreach(_libtorch_dir IN ITEMS ${CMAKE_PREFIX_PATH} ${_libtorch_env_prefix})
  list(APPEND _libtorch_candidates "${_libtorch_dir}" "${_libtorch_dir}/../..")
endforeach()
list(APPEND _libtorch_candidates ${LibTorch_FALLBACKS})
file(GLOB _libtorch_venv "${CMAKE_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch")
list(APPEND _libtorch_candidates ${_libtorch_venv})

set(LibTorch_ROOT_DIR "")
set(LibTorch_VERSION "")
set(LibTorch_BUILD "")
set(LibTorch_WHY_NOT "no LibTorch found")
foreach(_libtorch_dir IN LISTS _libtorch_candidates)
  if(EXISTS "${_libtorch_dir}/include/torch/csrc/api/include/torch/torch.h" AND EXISTS "${_libtorch_dir}/lib/libtorch_cpu.so")
    get_filename_component(LibTorch_ROOT_DIR "${_libtorch_dir}" REALPATH)
    break()
  endif()
endforeach()

if(LibTorch_ROOT_DIR)
  set(LibTorch_WHY_NOT "")
  foreach(_libtorch_header IN ITEMS torch/headeronly/version.h torch/csrc/api/include/torch/version.h)
    if(NOT LibTorch_VERSION AND EXISTS "${LibTorch_ROOT_DIR}/include/${_libtorch_header}")
      file(READ "${LibTorch_ROOT_DIR}/include/${_libtorch_header}" _libtorch_text)
      if(_libtorch_text MATCHES "TORCH_VERSION_MAJOR ([0-9]+).*TORCH_VERSION_MINOR ([0-9]+).*TORCH_VERSION_PATCH ([0-9]+)")
        set(LibTorch_VERSION "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}.${CMAKE_MATCH_3}")
      endif()
    endif()
  endforeach()
  # The variant's full name is in the zip's build-version, or in the wheel's version.py.
  set(LibTorch_BUILD "${LibTorch_VERSION}")
  if(EXISTS "${LibTorch_ROOT_DIR}/build-version")
    file(STRINGS "${LibTorch_ROOT_DIR}/build-version" LibTorch_BUILD LIMIT_COUNT 1)
  elseif(EXISTS "${LibTorch_ROOT_DIR}/version.py")
    file(STRINGS "${LibTorch_ROOT_DIR}/version.py" _libtorch_text REGEX "^__version__ = ")
    string(REGEX REPLACE ".*['\"](.*)['\"].*" "\\1" LibTorch_BUILD "${_libtorch_text}")
  endif()
  # Builds before 2.7 could have the old ABI of std::string, which nothing else here has.
  if(EXISTS "${LibTorch_ROOT_DIR}/share/cmake/Torch/TorchConfig.cmake")
    file(STRINGS "${LibTorch_ROOT_DIR}/share/cmake/Torch/TorchConfig.cmake" _libtorch_text REGEX "_GLIBCXX_USE_CXX11_ABI=0")
    if(_libtorch_text)
      set(LibTorch_WHY_NOT "the LibTorch in ${LibTorch_ROOT_DIR} has the pre-C++11 ABI; take its cxx11-abi build")
      set(LibTorch_ROOT_DIR "")
    endif()
  endif()
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(LibTorch REQUIRED_VARS LibTorch_ROOT_DIR VERSION_VAR LibTorch_VERSION
  REASON_FAILURE_MESSAGE "${LibTorch_WHY_NOT}")
if(NOT LibTorch_FOUND AND NOT LibTorch_WHY_NOT)
  set(LibTorch_WHY_NOT "the LibTorch in ${LibTorch_ROOT_DIR} is ${LibTorch_VERSION}, too old")
endif()

if(LibTorch_FOUND AND NOT TARGET LibTorch::LibTorch)
  foreach(_libtorch_part IN ITEMS c10 torch_cpu)
    add_library(LibTorch::${_libtorch_part} SHARED IMPORTED)
    set_target_properties(LibTorch::${_libtorch_part} PROPERTIES
      IMPORTED_LOCATION "${LibTorch_ROOT_DIR}/lib/lib${_libtorch_part}.so")
  endforeach()
  add_library(LibTorch::LibTorch INTERFACE IMPORTED)
  target_include_directories(LibTorch::LibTorch SYSTEM INTERFACE
    "${LibTorch_ROOT_DIR}/include" "${LibTorch_ROOT_DIR}/include/torch/csrc/api/include")
  target_compile_features(LibTorch::LibTorch INTERFACE cxx_std_17)
  target_link_libraries(LibTorch::LibTorch INTERFACE LibTorch::torch_cpu LibTorch::c10)
  # A CUDA build's torch_cpu names CUDA libraries that a machine without a GPU need not have.
  target_link_options(LibTorch::LibTorch INTERFACE -Wl,--allow-shlib-undefined)
  foreach(_libtorch_dir IN ITEMS "${LibTorch_ROOT_DIR}/../nvidia/cu13/lib" "${LibTorch_ROOT_DIR}/../nvidia/cuda_runtime/lib")
    if(EXISTS "${_libtorch_dir}" AND NOT SKBUILD)   # a wheel goes to other folders than those it was built in
      get_filename_component(_libtorch_dir "${_libtorch_dir}" REALPATH)
      target_link_options(LibTorch::LibTorch INTERFACE "-Wl,-rpath,${_libtorch_dir}")
    endif()
  endforeach()
  # Nothing of it is called by its name: it registers itself when it is loaded, and the linker must not leave it out.
  if(EXISTS "${LibTorch_ROOT_DIR}/lib/libtorch_cuda.so")
    add_library(LibTorch::CUDA INTERFACE IMPORTED)
    target_link_libraries(LibTorch::CUDA INTERFACE LibTorch::LibTorch)
    target_link_options(LibTorch::CUDA INTERFACE
      "-Wl,--push-state,--no-as-needed,${LibTorch_ROOT_DIR}/lib/libtorch_cuda.so,--pop-state")
  endif()
endif()
