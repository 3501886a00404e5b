# One node of a Ray cluster: `ray_node.sh PYTHON COMMAND...` starts Ray on this node, and on node 0, which is the
# head, also the command, whose exit code is written to $NODE_FOLDER/code. A node ends when its processes are killed.
# With NODE_JOB_SERVER=true the head takes jobs by `ray job submit`, at port 8265.
# Ray starts workers by `bash -c "exec PYTHON ..."`, so the path of its Python is one without blanks.
ln -sfn "${1%/bin/*}" "$NODE_FOLDER/venv"
python=$NODE_FOLDER/venv/bin/${1##*/}
shift
ray() { "$python" -m ray.scripts.scripts "$@"; }
gpus=${NODE_GPUS:+--num-gpus $NODE_GPUS}
export RAY_ADDRESS=$HEAD:6379
own=${HEAD%.*}.$((NODE + 1))
if [ "$NODE" = 0 ]; then
    ray start --head --node-ip-address "$own" --port 6379 --num-cpus 1 $gpus --temp-dir /tmp/ray \
        --include-dashboard "${NODE_JOB_SERVER:-false}"
    until [ "$("$python" -c "import ray; ray.init(logging_level='error'); print(len(ray.nodes()))")" = "$NODES" ]; do
        sleep 1
    done
    "$@"
    echo $? > "$NODE_FOLDER/code"
    sleep infinity
else
    head=$RAY_ADDRESS
    unset RAY_ADDRESS
    ray start --address "$head" --node-ip-address "$own" --num-cpus 1 $gpus --block
fi
